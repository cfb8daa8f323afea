"""Two jobs with one command at a time, as in one Slurm job: each has its own name and agent."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.support import ranks
from tests.support.launchers import free_port


def read_until_step(process: subprocess.Popen[str], step: int) -> str:
    """What a job says up to that step."""
    said = ""
    assert process.stdout is not None
    for line in process.stdout:
        said += line
        if line.startswith(f"r0 {step} "):
            return said
    raise AssertionError(said)


@pytest.mark.timeout(180)
def test_a_second_job_with_the_same_command_gets_a_name_of_its_own(tmp_path: Path) -> None:
    enough = tmp_path / "enough"
    address = {"MASTER_ADDR": "127.0.0.1", "RANK": "0", "WORLD_SIZE": "1", "SLURM_JOB_ID": "4713"}
    with ranks.bench() as bench:
        started, said = [], []
        try:
            for _ in range(2):
                port = str(free_port())
                started.append(
                    bench.start(ranks.TRAINING, "--until", str(enough), **address, MASTER_PORT=port)
                )
                said.append(read_until_step(started[-1], 3))
        finally:
            enough.touch()
            rest = [ranks.said_by([process]) for process in started]
    assert all(step > 3 for text in rest for step in ranks.committed(text)), rest
    assert "still runs" not in said[0] and "which has the same command, still runs" in said[1]
    assert len(set(ranks.job_ids("".join(said)))) == 2
