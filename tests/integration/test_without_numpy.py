"""torch does not depend on NumPy: a fresh environment has none, and jobs are protected there, too."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.launchers import (
    agent_pids,
    job_environment,
    kill_all,
    said_under_torchrun,
)

pytestmark = pytest.mark.exact

SCRIPT = """
import copy, os, random, sys
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
dist.init_process_group(backend="reft")
assert "numpy" not in sys.modules
torch.manual_seed(1)
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Dropout(0.2))
average = copy.deepcopy(model)
wrapped = DistributedDataParallel(model)
optimizer = torch.optim.AdamW(wrapped.parameters(), lr=0.1)
dice = torch.Generator().manual_seed(3)
loader = DataLoader(TensorDataset(torch.randn(24, 4)), batch_size=4, shuffle=True)
total, seen = torch.zeros(3), []
for epoch in range(2):
    for (x,) in loader:
        loss = wrapped(x + torch.rand(1, generator=dice)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        for slow, fast in zip(average.parameters(), model.parameters()):
            slow.data.lerp_(fast.data, 0.1)
        total += loss.detach() * random.random()
        seen.append(float(total.sum()))
state = [p.tolist() for m in (model, average) for p in m.state_dict().values()]
sys.stdout.write(f"r{dist.get_rank()} final {seen} {state}\\n")
dist.destroy_process_group()
"""


def run(folder: Path, **env: str) -> str:
    script = folder / "train.py"
    script.write_text("import random; random.seed(5)\n" + SCRIPT)
    absent = folder / "absent" / "numpy"
    absent.mkdir(parents=True, exist_ok=True)
    (absent / "__init__.py").write_text("raise ModuleNotFoundError('none here', name='numpy')\n")
    environment = job_environment(folder, REFT_AGENT_LINGER_SEC="60", **env)
    environment["PYTHONPATH"] = f"{absent.parent}:{environment['PYTHONPATH']}"
    try:
        return said_under_torchrun(script, environment, ranks=2, max_restarts=1)
    finally:
        kill_all(agent_pids(folder / "run"))


def finals(said: str) -> list[str]:
    return sorted(re.findall(r"^(r\d final .*)$", said, re.MULTILINE))


def test_a_killed_job_resumes_and_is_verified(tmp_path: Path) -> None:
    for name in ("whole", "killed"):
        (tmp_path / name).mkdir()
    whole = run(tmp_path / "whole")
    assert "error in step" not in whole and len(finals(whole)) == 2, whole
    # All ranks die before one has begun to copy step 8: both slots hold whole steps.
    killed = run(
        tmp_path / "killed", REFT_FAULT="*:8:capture:kill", REFT_RESUME_VERIFY="always"
    )
    assert re.search(r"resumed at step 7: .* is bit-identical", killed), killed
    assert "error in step" not in killed and finals(killed) == finals(whole), killed
