"""REFT_SNAPSHOT_POLICY: under every policy what is sealed is the state at the program point, and under `gap` it moves in gaps."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration import test_never_wrong
from tests.integration.never_wrong_worker import SCENARIOS
from tests.support.launchers import Forkrun, agent_pids, kill_all

pytestmark = pytest.mark.exact
HERE = Path(__file__).resolve().parent


TIERS = ("at_once", "gap", "compute", "communication", "gate")
STEPS = 30


@pytest.fixture(scope="module")
def forkrun() -> Iterator[Forkrun]:
    launcher = Forkrun()
    yield launcher
    launcher.close()


def run(forkrun: Forkrun, kind: str, ranks: int, **env: str) -> list[dict[str, Any]]:
    """What each rank's worker wrote."""
    scratch = Path(tempfile.mkdtemp(prefix="reft-place-"))
    try:
        environment = {"REFT_JOB_ID": f"placement-{kind}", "REFT_RUN_DIR": str(scratch / "run")}
        environment |= {"REFT_AGENT_LINGER_SEC": "1", "REFT_RESUME": "state"} | env
        argv = [str(HERE / "placement_worker.py"), kind, str(STEPS), str(scratch)]
        forkrun.run(argv, environment, scratch / "log", ranks, 100)
        return [json.loads((scratch / f"rank-{rank}.json").read_text()) for rank in range(ranks)]
    finally:
        kill_all(agent_pids(scratch / "run"))
        shutil.rmtree(scratch, ignore_errors=True)


def check(results: list[dict[str, Any]], policy: str) -> dict[str, int]:
    """What holds under every policy; returns the bytes of all ranks by tier."""
    for result in results:
        assert not result["wrong"], result["wrong"][:5]
        assert result["policy"] == policy
        assert result["steps"] == STEPS
        assert result["sealed"] == result["captured"] == STEPS, result
        assert result["verified"] >= STEPS - 2, "almost every snapshot was there to be compared"
        assert result["errors"] == result["dropped"] == result["skipped"] == result["op_events_lost"] == 0, result
        assert sum(result[f"{tier}_copied_bytes"] for tier in TIERS) == result["bytes_copied"], result
        assert result["bytes_copied"] == STEPS * result["payload_bytes"]
    return {tier: sum(result[f"{tier}_copied_bytes"] for result in results) for tier in TIERS}


@pytest.mark.timeout(180)
@pytest.mark.parametrize("threads", ["1", "2"])
def test_pipeline_copies_in_its_bubbles(forkrun: Forkrun, threads: str) -> None:
    env = {"REFT_SNAPSHOT_POLICY": "gap", "REFT_SNAPSHOT_CHUNK_BYTES": "64K", "REFT_SNAPSHOT_THREADS": threads}
    tiers = check(run(forkrun, "pipeline", 4, **env), "gap")
    assert tiers["gap"] > 0, tiers


@pytest.mark.timeout(180)
def test_replicas_copy_without_gaps(forkrun: Forkrun) -> None:
    tiers = check(run(forkrun, "ddp", 2, REFT_SNAPSHOT_POLICY="gap", REFT_SNAPSHOT_CHUNK_BYTES="64K"), "gap")
    assert tiers["compute"] + tiers["communication"] + tiers["gate"] > 0, tiers


@pytest.mark.timeout(180)
@pytest.mark.parametrize("kind", ["pipeline", "ddp"])
def test_sync_leaves_nothing_to_copy_when_the_step_returns(forkrun: Forkrun, kind: str) -> None:
    results = run(forkrun, kind, 2, REFT_SNAPSHOT_POLICY="sync")
    tiers = check(results, "sync")
    assert tiers["at_once"] == sum(tiers.values())
    assert all(result["gate_ns"] == 0 for result in results)


@pytest.mark.timeout(180)
def test_gap_is_the_default(forkrun: Forkrun) -> None:
    check(run(forkrun, "ddp", 2), "gap")


@pytest.mark.timeout(180)
def test_eager_tells_where_its_bytes_fell(forkrun: Forkrun) -> None:
    check(run(forkrun, "pipeline", 2, REFT_SNAPSHOT_POLICY="eager"), "eager")


@pytest.mark.timeout(120)
@pytest.mark.parametrize("scenario", [name for name in SCENARIOS if name != "data_one"])
def test_whatever_a_script_writes_between_steps(forkrun: Forkrun, scenario: str) -> None:
    """Under the other policy: test_never_wrong.py has the default one."""
    env = {"REFT_SNAPSHOT_POLICY": "eager", "REFT_SNAPSHOT_CHUNK_BYTES": "64K"}
    result, said = test_never_wrong.run(forkrun, scenario, **env)
    test_never_wrong.check(scenario, result, said)
    if scenario in test_never_wrong.CLEAN:
        assert result["dropped"] == 0, said[-3000:]
    else:
        assert result["sealed"] >= 4, said[-3000:]


@pytest.mark.timeout(120)
def test_every_byte_of_a_late_write_is_seen_by_full_verification(forkrun: Forkrun) -> None:
    env = {"REFT_SNAPSHOT_POLICY": "eager", "REFT_SNAPSHOT_VERIFY": "full"}
    result, said = test_never_wrong.run(forkrun, "data_one", **env)
    test_never_wrong.check("data_one", result, said)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("policy", "models"), [("gap", ["pipe", "fsdp"]), ("eager", ["ddp", "pipe"])])
def test_killed_jobs_resume_bit_for_bit(tmp_path: Path, policy: str, models: list[str]) -> None:
    written = tmp_path / "kill.json"
    campaign = str(HERE.parent / "fault" / "kill_campaign.py")
    command = [sys.executable, campaign, "--cases", "4", "--seed", "5"]
    done = subprocess.run(
        [*command, "--models", *models, "--json", str(written)],
        env=os.environ | {"REFT_SNAPSHOT_POLICY": policy},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    result = json.loads(written.read_text())
    assert result["cases"]["failed"] == 0
    assert result["metrics"]["wrong_bits"]["value"] == result["metrics"]["hangs"]["value"] == 0
