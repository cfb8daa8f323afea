"""A step that the ranks count differently is never committed: the parts of such a snapshot belong to different iterations."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

pytest.importorskip("torch")

from tests.support.launchers import torchrun

# Two pipeline stages, as a script may write them: no data-parallel replicas whose hashes could tell
# the difference.
pytestmark = pytest.mark.exact
SCRIPT = """
import os, signal, sys, torch, torch.distributed as dist

dist.init_process_group("reft")
rank = dist.get_rank()
torch.manual_seed(rank)
stage = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(stage.parameters(), lr=0.1)
for iteration in range(1, 13):
    if rank == 0:
        dist.send(stage(torch.randn(2, 4)).detach(), 1)
        back = torch.zeros(2, 4)
        dist.recv(back, 1)
    else:
        given = torch.zeros(2, 4)
        dist.recv(given, 0)
        dist.send(given, 0)
    stage(torch.ones(1, 4)).sum().backward()
    if not (rank == 1 and iteration == 6):  # what a GradScaler does on one stage only
        optimizer.step()
    optimizer.zero_grad()
    if iteration == 11 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os.kill(os.getpid(), signal.SIGKILL)
dist.destroy_process_group()
"""


@pytest.mark.timeout(120)
def test_steps_that_ranks_count_differently_are_not_resumed(folder: Path) -> None:
    script = folder / "train.py"
    script.write_text(SCRIPT)
    command = torchrun(script, ranks=2, options=("--standalone", "--max-restarts=1"))
    env = os.environ | {"REFT_RUN_DIR": str(folder), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert "resumed at step 5: state and place in the loop" in done.stderr, done.stderr
