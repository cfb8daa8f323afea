"""A rank that the kernel's OOM killer ends: the job goes on from memory and says why it had to."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("reft._C", reason="needs the native module")


from tests.support.launchers import job_environment, torchrun

LIMIT = 1200 << 20

SCRIPT = f"""
import os, sys
import torch
import torch.distributed as dist

first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
if os.environ["RANK"] == "1" and first:
    with open(sys.argv[1], "w") as processes:
        processes.write(str(os.getpid()))
dist.init_process_group("reft")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
hoard = []
for step in range(20):
    optimizer.zero_grad()
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    if dist.get_rank() == 1 and first and step == 10:
        while len(hoard) < 40:
            hoard.append(torch.ones({LIMIT >> 4}))  # a quarter of the limit
dist.destroy_process_group()
print("ended", flush=True)
"""


# Fits the limit with a fifth to spare, and not with two snapshots beside it.
TIGHT = f"""
import os, sys
import torch
import torch.distributed as dist

with open(sys.argv[1], "w") as processes:
    processes.write(str(os.getpid()))
dist.init_process_group("reft")
size = {LIMIT // 12 // 4}
weight = torch.nn.Parameter(torch.zeros(size))
optimizer = torch.optim.SGD([weight], 0.1, momentum=0.9)
for step in range(4):
    optimizer.zero_grad()
    (weight.sum() * step).backward()
    optimizer.step()
ballast = torch.ones({LIMIT // 4 // 4})
for step in range(3):
    optimizer.step()
dist.destroy_process_group()
print("ended at the first attempt", os.environ["TORCHELASTIC_RESTART_COUNT"] == "0", flush=True)
"""


@pytest.fixture
def limited() -> Iterator[Path]:
    """The list of processes of a cgroup that may have LIMIT bytes."""
    name = f"reft-test-{os.getpid()}"
    for folder, limit in (("memory/", "memory.limit_in_bytes"), ("", "memory.max")):
        group = Path(f"/sys/fs/cgroup/{folder}{name}")
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            (group / limit).write_text(str(LIMIT))
            (group / "cgroup.procs").open("w").close()
            yield group / "cgroup.procs"
            return
        except OSError:
            continue
        finally:
            group.rmdir()
    pytest.skip("no cgroup with a memory limit can be made here")


def test_who_the_oom_killer_ended_is_told_to_the_next_attempt(tmp_path: Path, limited: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    command = torchrun(script, str(limited), ranks=2, options=("--standalone", "--max-restarts=1"))
    environment = job_environment(tmp_path, REFT_AGENT_LINGER_SEC="60")
    job = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    text = job.stdout + job.stderr
    assert job.returncode == 0 and text.count("ended\n") == 2, text
    said = " ".join(text.split())
    assert "why the previous ranks ended:" in said and "resumed at step" in said, text
    assert "is gone; the kernel's OOM killer has ended a process of its cgroup" in said, text


def test_a_job_that_fits_its_limit_is_not_killed_for_the_vault(tmp_path: Path, limited: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(TIGHT)
    command = torchrun(script, str(limited), ranks=1, options=("--standalone", "--max-restarts=1"))
    environment = job_environment(tmp_path, REFT_AGENT_LINGER_SEC="1")
    job = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    text = job.stdout + job.stderr
    assert "ended at the first attempt True" in text, text
    said = " ".join(text.split())
    assert "but the limit is" in said or "memory is short" in said or "has not enough left" in said, text
