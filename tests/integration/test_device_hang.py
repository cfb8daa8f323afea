"""A device that does not come to a collective: all hosts have begun it, and a verdict names the rank
whose stream has not reached it (real ProcessGroupNCCL, on stand-in devices where there is no GPU)."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.cuda import environment as cuda
from tests.support.launchers import Forkrun, agent_pids, job_environment, kill_all

pytestmark = pytest.mark.skipif(bool(cuda.missing()), reason=cuda.missing())
WORKER = Path(__file__).with_name("device_hang_worker.py")
RANKS = 3
SUSPECT_SEC = 3


@pytest.fixture(scope="module")
def forkrun() -> Iterator[Forkrun]:
    if cuda.devices_there() < RANKS:
        pytest.skip(f"needs {RANKS} devices, and this machine has {cuda.devices_there()}")
    launcher = Forkrun(cuda.environment(RANKS))
    yield launcher
    launcher.close()


def start(forkrun: Forkrun, folder: Path, *words: str, **settings: str) -> Path:
    """Starts a job; its log."""
    own = job_environment(folder, REFT_HANG_SUSPECT_SEC=str(SUSPECT_SEC), **settings)
    there = cuda.environment(RANKS)
    paths = [own["PYTHONPATH"], *filter(None, [there.get("PYTHONPATH")])]
    log = folder / "said"
    forkrun.start(
        [str(WORKER), *words], own | there | {"PYTHONPATH": os.pathsep.join(paths)}, log, RANKS, 0
    )
    return log


def verdicts(folder: Path) -> list[dict[str, Any]]:
    """Oldest first. The text of each is written after its JSON."""
    texts = sorted((folder / "run").glob("*/node-*/verdicts/*.txt"))
    return [json.loads(path.with_suffix(".json").read_bytes()) for path in texts]


def first_verdict(forkrun: Forkrun, folder: Path, log: Path) -> dict[str, Any]:
    deadline = time.monotonic() + 120
    try:
        while not (found := verdicts(folder)):
            assert time.monotonic() < deadline, log.read_text(errors="replace")[-4000:]
            assert forkrun.poll() is None, log.read_text(errors="replace")[-4000:]
            time.sleep(0.05)
        return found[0]
    finally:
        forkrun.kill()
        kill_all(agent_pids(folder / "run"))


@pytest.mark.timeout(240)
@pytest.mark.parametrize(("what", "late"), [("kernel", 1), ("event", 1), ("inner", 2)])
def test_the_rank_whose_device_does_not_come_is_named(
    forkrun: Forkrun, folder: Path, what: str, late: int
) -> None:
    log = start(forkrun, folder, what, "600", "60")
    verdict = first_verdict(forkrun, folder, log)
    assert verdict["state"] == "hang", verdict["screen"]
    assert [culprit["rank"] for culprit in verdict["culprits"]] == [late], verdict["screen"]
    assert verdict["class"] == "device_behind"
    assert f"the device of rank {late} has not reached all_reduce" in verdict["screen"]
    assert "device_hang_worker.py" in verdict["screen"]


@pytest.mark.timeout(240)
def test_without_marks_nobody_is_named(forkrun: Forkrun, folder: Path) -> None:
    """The marks are what shows it: without, hosts alone do not tell the ranks apart."""
    log = start(forkrun, folder, "kernel", "15", "34", REFT_HANG_DEVICE_MARKS="0")
    deadline = time.monotonic() + 150
    while (code := forkrun.poll()) is None and time.monotonic() < deadline:
        time.sleep(0.05)
    assert code == 0, log.read_text(errors="replace")[-4000:]
    assert [verdict["culprits"] for verdict in verdicts(folder) if verdict["culprits"]] == []


@pytest.mark.timeout(240)
def test_a_long_kernel_that_ends_is_no_hang(forkrun: Forkrun, folder: Path) -> None:
    """Longer than suspicion takes to look, and shorter than a report."""
    log = start(forkrun, folder, "long", "2", "60")
    deadline = time.monotonic() + 150
    while (code := forkrun.poll()) is None and time.monotonic() < deadline:
        time.sleep(0.05)
    said = log.read_text(errors="replace")
    assert code == 0, said[-4000:]
    assert said.count("trained to the end") == RANKS
    assert verdicts(folder) == []
