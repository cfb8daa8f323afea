"""Processes of the same launch, as they are found from outside."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from reft._link import other_process

LAUNCH = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511", "WORLD_SIZE": "4"}
FIND = "from reft._link import other_process; print(other_process.siblings(0))"


@contextmanager
def sleeper(command: str = "echo; exec sleep 600", **env: str) -> Iterator[int]:
    process = subprocess.Popen(
        ["sh", "-c", command],
        env={"PATH": os.environ["PATH"], **env},
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        assert process.stdout is not None and process.stdout.readline() == b"\n"
        yield process.pid
    finally:
        os.killpg(process.pid, 9)
        process.communicate()


def found_by_rank_0(**env: str) -> dict[int, list[int]]:
    package = str(Path(other_process.__file__).resolve().parents[2])
    base = {"PATH": os.environ["PATH"], "PYTHONPATH": package}
    done = subprocess.run(
        [sys.executable, "-c", FIND], env={**base, **env}, check=True, capture_output=True, text=True
    )
    return eval(done.stdout)  # type: ignore[no-any-return]  # of literals, from this test


def test_ranks_of_the_same_launch_are_found_with_what_they_started() -> None:
    nested = "sleep 600 & echo; wait"
    with (
        sleeper(**LAUNCH, RANK="1") as first,
        sleeper(nested, **LAUNCH, RANK="2") as second,
        sleeper(**LAUNCH, RANK="0"),
        sleeper(**{**LAUNCH, "MASTER_PORT": "29512"}, RANK="3"),
        sleeper(**LAUNCH, TORCHELASTIC_RUN_ID="other", RANK="3"),
        sleeper(RANK="3"),
        sleeper(**LAUNCH, RANK="x"),
    ):
        found = found_by_rank_0(**LAUNCH, RANK="0")
        assert found[1] == [first]
        assert found[2][0] == second and len(found[2]) == 2
        assert set(found) == {1, 2}


def test_the_variables_of_slurm_do() -> None:
    launch = {"SLURM_JOB_ID": "77", "SLURM_STEP_ID": "0"}
    with sleeper(**launch, SLURM_PROCID="1") as pid:
        assert found_by_rank_0(**launch, SLURM_PROCID="0") == {1: [pid]}


def test_without_variables_of_a_launch_nobody_is_found() -> None:
    with sleeper(RANK="1"):
        assert found_by_rank_0(RANK="0") == {}
        assert found_by_rank_0() == {}


def test_use_is_that_of_all_processes_together() -> None:
    with sleeper() as idle:
        busy = subprocess.Popen([sys.executable, "-c", "print(1, flush=True)\nwhile True: pass"], stdout=subprocess.PIPE)
        try:
            assert busy.stdout is not None and busy.stdout.readline() == b"1\n"
            both = other_process.use_of([idle, busy.pid])
            assert both.io_bytes > 0 and both.cpu_sec >= 0
            assert not other_process.use_of([idle]).running
            while not other_process.use_of([busy.pid]).running:
                pass
            while other_process.use_of([busy.pid]).cpu_sec <= both.cpu_sec:
                pass
        finally:
            busy.kill()
            busy.communicate()
    assert other_process.use_of([idle]) == other_process.Use(0.0, 0, False)
