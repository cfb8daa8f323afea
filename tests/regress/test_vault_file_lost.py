"""A store into a vault file whose pages the disk has lost ends the snapshots, not the training."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.launchers import free_port

SCRIPT = """
import os, sys
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("reft")
torch.manual_seed(3)
model = DistributedDataParallel(torch.nn.Linear(64, 64))
optimizer = torch.optim.Adam(model.parameters())
for step in range(12):
    if step == 5:
        os.truncate(sys.argv[1], 0)  # as SIGBUS reports a failed disk, too
    optimizer.zero_grad()
    model(torch.randn(4, 64)).square().mean().backward()
    optimizer.step()
    print("step", step, flush=True)
print("end", model.module.weight.sum().item().hex(), flush=True)
dist.destroy_process_group()
"""


@pytest.mark.parametrize("lost", [False, True])
def test_training_goes_on(tmp_path: Path, lost: bool) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    other = tmp_path / "other"
    other.write_bytes(b"")
    vault = tmp_path / "vaults" / "lost" / "rank-0.vault"
    environment = os.environ | {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "OMP_NUM_THREADS": "1",
        "REFT_JOB_ID": "lost",
        "REFT_RUN_DIR": str(tmp_path / "run"),
        "REFT_VAULT_DIR": str(tmp_path / "vaults"),
        "REFT_AGENT_LINGER_SEC": "1",
    }
    done = subprocess.run(
        [sys.executable, str(tmp_path / "train.py"), str(vault if lost else other)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("step") == 12 and "end" in done.stdout
    said = "the disk under REFT_VAULT_DIR has failed. Training continues without snapshots"
    assert done.stderr.count(said) == lost, done.stderr
