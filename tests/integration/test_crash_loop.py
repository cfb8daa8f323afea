"""REFT_CRASH_LOOP_LIMIT: a job that fails alike again and again ends before its restarts are spent."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("reft._C", reason="needs the native module")

from tests.support.launchers import Torchrun, TrainJob

MAX_RESTARTS = 5


@pytest.mark.timeout(240)
@pytest.mark.parametrize("limit", ["2", "0"])
def test_the_launcher_ends_at_the_limit(folder: Path, limit: str) -> None:
    restarts = MAX_RESTARTS if limit == "2" else 2
    job = TrainJob(Torchrun(), folder, f"loop-{limit}", max_restarts=restarts)
    try:
        job.start("--crash-at", "4", REFT_CRASH_LOOP_LIMIT=limit)
        assert job.wait(200) != 0
        said = job.log.read_text()
        attempts = len(list(job.out.glob("r0.a*.pid")))
        if limit == "0":
            assert attempts == 1 + restarts and "the launcher is ended" not in said
            assert "the same failure at the same step for the 3. time in a row" in said, said
        else:
            # The launcher may have begun another attempt before the agent has decided.
            assert 2 <= attempts <= 3, said
            assert "the same failure at the same step for the 2. time in a row" in said
            assert "now: the launcher is ended, as REFT_CRASH_LOOP_LIMIT=2" in said
    finally:
        job.end()
