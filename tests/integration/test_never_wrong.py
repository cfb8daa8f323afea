"""Whatever a script does to its weights between two steps: what is sealed equals the state at the program point, or is dropped."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.never_wrong_worker import SCENARIOS, STEPS
from tests.support.launchers import Forkrun, agent_pids, kill_all

pytestmark = pytest.mark.exact
HERE = Path(__file__).resolve().parent


CLEAN = {"quiet", "whole", "buffers", "batches", "two"}  # nothing is written late: nothing may be dropped


@pytest.fixture(scope="module")
def forkrun() -> Iterator[Forkrun]:
    launcher = Forkrun()
    yield launcher
    launcher.close()


def run(forkrun: Forkrun, scenario: str, **env: str) -> tuple[dict[str, Any], str]:
    """What the worker found, and what was said."""
    scratch = Path(tempfile.mkdtemp(prefix="reft-nw-"))
    try:
        out = scratch / "out.json"
        environment = {
            "REFT_JOB_ID": f"never-wrong-{scenario}",
            "REFT_RUN_DIR": str(scratch / "run"),
            "REFT_AGENT_LINGER_SEC": "1",
        }
        environment |= {"REFT_RESUME": "state"} | env  # else the checker's clones would be taken for loop variables
        said = forkrun.run(
            [str(HERE / "never_wrong_worker.py"), scenario, str(out)], environment, scratch / "log", 2, 60
        )
        return json.loads(out.read_text()), said
    finally:
        kill_all(agent_pids(scratch / "run"))
        shutil.rmtree(scratch, ignore_errors=True)


def check(scenario: str, result: dict[str, Any], said: str) -> None:
    assert not result["wrong"], result["wrong"][:5]
    assert result["errors"] == 0, said[-3000:]
    # Every captured snapshot was sealed or counted as dropped.
    assert result["captured"] == result["sealed"] + result["dropped"], result
    assert result["captured"] + result["skipped"] == result["steps"], result
    # Each iteration had a program point, but for one in which the closing optimizer was not yet
    # known.
    assert result["steps"] >= result["optimizer_steps"] / (2 if scenario == "two" else 1) - 2, result
    assert len(result["verified"]) >= min(4, result["sealed"]), result


@pytest.mark.timeout(120)
@pytest.mark.parametrize("scenario", [name for name in SCENARIOS if name != "data_one"])
@pytest.mark.parametrize("chunk", ["4M", "64K"])
def test_sealed_is_the_state_at_the_program_point(forkrun: Forkrun, scenario: str, chunk: str) -> None:
    result, said = run(forkrun, scenario, REFT_SNAPSHOT_CHUNK_BYTES=chunk)
    check(scenario, result, said)
    if scenario in CLEAN:
        assert result["dropped"] == 0, said[-3000:]
        assert result["sealed"] >= STEPS - 2
    else:
        # What was caught once is copied early from then on: training does not stay unprotected.
        assert result["sealed"] >= 4, said[-3000:]


@pytest.mark.timeout(120)
def test_whole_state_is_in_the_snapshots(forkrun: Forkrun) -> None:
    result, _ = run(forkrun, "whole")
    assert result["compared_by_all"] == result["alive_bytes"]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("scenario", ["data", "data_one", "ema"])
def test_full_verification_sees_every_byte(forkrun: Forkrun, scenario: str) -> None:
    result, said = run(forkrun, scenario, REFT_SNAPSHOT_VERIFY="full")
    check(scenario, result, said)
