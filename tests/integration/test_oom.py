"""A rank that the kernel's OOM killer ends: the job goes on from memory and says why it had to."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("reft._C", reason="needs the native module")


from tests.support import cgroups
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


# Fits the limit with a fifth to spare, but not together with two snapshots.
TIGHT = f"""
import os, sys
import torch
import torch.distributed as dist

with open(sys.argv[1], "w") as processes:
    processes.write(str(os.getpid()))
dist.init_process_group("reft")
ballast = torch.ones({LIMIT * 2 // 5 // 4}) if sys.argv[2] == "early" else None
weight = torch.nn.Parameter(torch.zeros({LIMIT // 12 // 4}))
optimizer = torch.optim.SGD([weight], 0.1, momentum=0.9)
for step in range(6):
    optimizer.zero_grad()
    (weight.sum() * step).backward()
    optimizer.step()
    if step == 2 and sys.argv[2] == "late":
        ballast = torch.ones({LIMIT * 9 // 20 // 4})
dist.destroy_process_group()
print("ended in attempt", os.environ["TORCHELASTIC_RESTART_COUNT"], flush=True)
"""


@pytest.fixture
def limited() -> Iterator[Path]:
    """The list of processes of a cgroup that may have LIMIT bytes."""
    with cgroups.limited(f"reft-test-{os.getpid()}", LIMIT) as processes:
        if processes is None:
            pytest.skip("no cgroup with a memory limit can be made here")
        yield processes


def test_who_the_oom_killer_ended_is_named(tmp_path: Path, limited: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    command = torchrun(script, str(limited), ranks=2, options=("--standalone", "--max-restarts=1"))
    environment = job_environment(tmp_path, REFT_AGENT_LINGER_SEC="60")
    job = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    text = job.stdout + job.stderr
    assert job.returncode == 0 and text.count("ended\n") == 2, text
    said = " ".join(text.split())
    assert "crash, oom_kill (certain)" in said and "resumed at step" in said, text
    killed = "failed first: rank 1 was ended by SIGKILL; the kernel's OOM killer has ended a process of its cgroup"
    assert killed in said, text
    assert "why the previous ranks ended" not in said, "the launcher's output has it"


def run_tight(tmp_path: Path, limited: Path, when: str) -> str:
    script = tmp_path / "train.py"
    script.write_text(TIGHT)
    options = ("--standalone", "--max-restarts=2")
    command = torchrun(script, str(limited), when, ranks=1, options=options)
    environment = job_environment(tmp_path, REFT_AGENT_LINGER_SEC="30", REFT_RESUME_VERIFY="off")
    job = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    return " ".join((job.stdout + job.stderr).split())


def test_a_job_that_fits_its_limit_is_not_killed_for_the_vault(tmp_path: Path, limited: Path) -> None:
    said = run_tight(tmp_path, limited, "early")
    assert "ended in attempt 0" in said, said
    assert "but the limit is" in said and "Training continues without snapshots" in said, said


def test_after_an_oom_kill_the_next_attempt_does_without_snapshots(
    tmp_path: Path, limited: Path
) -> None:
    """It takes its memory at once, when the vault has its own: nothing can be given back in time."""
    said = run_tight(tmp_path, limited, "late")
    assert "ended in attempt 1" in said, said
    assert said.count("this attempt trains WITHOUT snapshots") == 1 and "resumed at step" in said, said
