"""Processes of the same launch, as they are found from outside."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from reft._link import other_process

LAUNCH = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511", "WORLD_SIZE": "4"}
# Without the rest of the package, whose import takes longer.
FIND = "import other_process; print(other_process.siblings(0, 4))"


@contextmanager
def sleeper(
    command: str = "echo; exec sleep 600", above: tuple[str, ...] = (), **env: str
) -> Iterator[int]:
    process = subprocess.Popen(
        [*above, "sh", "-c", command],
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
    folder = str(Path(other_process.__file__).resolve().parent)
    base = {"PATH": os.environ["PATH"], "PYTHONPATH": folder}
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
        sleeper(**LAUNCH, RANK="4"),
        sleeper(**LAUNCH, TORCHELASTIC_RESTART_COUNT="0", RANK="3"),
        sleeper(**LAUNCH, SLURM_RESTART_COUNT="0", RANK="3"),
    ):
        found = found_by_rank_0(**LAUNCH, RANK="0")
        assert found[1] == [first]
        assert found[2][0] == second and len(found[2]) == 2
        assert set(found) == {1, 2}


def test_children_of_the_own_launcher_come_before_what_an_earlier_attempt_has_left() -> None:
    alike = {**LAUNCH, "RANK": "1"}
    with (
        sleeper("sleep 600 & echo; wait", above=("env", "-u", "RANK"), **alike) as first,
        sleeper("env RANK=1 sleep 600 & echo; wait", **LAUNCH) as other_launcher,
    ):
        # `first` has no rank itself; its child has none either.
        (left,) = found_by_rank_0(**LAUNCH, RANK="0")[1]
        assert left not in (first, other_launcher)
        with sleeper("sleep 600 & echo; wait", **alike) as rank_1:
            found = found_by_rank_0(**LAUNCH, RANK="0")[1]
            assert found[0] == rank_1 and len(found) == 2 and left not in found


def test_the_variables_of_slurm_do() -> None:
    launch = {"SLURM_JOB_ID": "77", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4"}
    with sleeper(**launch, SLURM_PROCID="1") as pid:
        assert found_by_rank_0(**launch, SLURM_PROCID="0") == {1: [pid]}


def test_a_rank_variable_counts_only_with_the_size_of_this_job() -> None:
    launch = {"SLURM_JOB_ID": "77", "SLURM_STEP_NUM_TASKS": "1", "MASTER_PORT": "29511"}
    with sleeper(**launch, SLURM_PROCID="1"), sleeper(**launch, WORLD_SIZE="5", RANK="1"):
        assert found_by_rank_0(**launch, SLURM_PROCID="0") == {}
        assert found_by_rank_0(**launch, SLURM_PROCID="0", WORLD_SIZE="5", RANK="0") == {}
        assert found_by_rank_0(**launch, PMIX_RANK="0") == {}


def test_without_variables_of_a_launch_nobody_is_found() -> None:
    with sleeper(RANK="1"):
        assert found_by_rank_0(RANK="0") == {}
        assert found_by_rank_0() == {}


def test_use_is_known_of_each_process() -> None:
    with sleeper() as idle:
        busy = subprocess.Popen([sys.executable, "-c", "print(1, flush=True)\nwhile True: pass"], stdout=subprocess.PIPE)
        try:
            assert busy.stdout is not None and busy.stdout.readline() == b"1\n"
            both = other_process.use_of([idle, busy.pid])
            assert (both[busy.pid].io_bytes or 0) > 0
            while other_process.use_of([idle])[idle].running:  # until sh has become sleep
                pass
            while not other_process.use_of([busy.pid])[busy.pid].running:
                pass
            while other_process.use_of([busy.pid])[busy.pid].cpu_sec <= both[busy.pid].cpu_sec:
                pass
        finally:
            busy.kill()
            busy.communicate()
    assert other_process.use_of([idle]) == {}


@pytest.mark.parametrize(("state", "running"), [("R", True), ("S", False), ("D", False)])
def test_who_waits_for_a_disk_does_not_run(
    state: str, running: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    stat = f"7 (a) b) {state} 1 7 7 0 -1 0 100 0 3 0 200 100 0 0 20 0 1 0 5"
    monkeypatch.setattr(other_process, "_text", lambda path: stat if path.endswith("stat") else "")
    ticks, page = os.sysconf("SC_CLK_TCK"), os.sysconf("SC_PAGE_SIZE")
    assert other_process.use_of([7]) == {7: other_process.Use(300 / ticks, None, 3 * page, running)}
