"""Commands that follow each other in one Slurm job, or in one shell: another command is another
job, whatever the first one left; the same command continues."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.support import ranks


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "env", [pytest.param({"SLURM_JOB_ID": "4712"}, id="slurm"), pytest.param({}, id="shell")]
)
def test_another_command_starts_clean_and_the_same_one_continues(env: dict[str, str]) -> None:
    with ranks.bench(**env) as bench:
        killed = bench.ranks("--lr", "0.1", "--kill", "1:5")
        assert len(ranks.losses(killed, 1)) == 6, killed
        other = bench.ranks("--lr", "0.2")
        assert ranks.committed(other) == [8, 8] and len(ranks.losses(other)) == 8, other
        assert "is kept for that job" in other and "resum" not in other, other
        again = bench.ranks("--lr", "0.1", "--kill", "1:5")
    assert ranks.job_ids(again) == ranks.job_ids(killed) != ranks.job_ids(other)
    (step,) = ranks.resumed_at(again)
    assert step >= 5 and "an earlier start of the same command" in again, again
    # One iteration of the restarted script is discarded.
    assert (
        ranks.losses(again, 1)[1:] == ranks.losses(killed, 1)[step:] + ranks.losses(again, 1)[-2:]
    )


@pytest.mark.timeout(300)
def test_another_script_under_one_id_of_torchrun_starts_clean(tmp_path: Path) -> None:
    another = tmp_path / "finetune.py"
    shutil.copy(ranks.TRAINING, another)
    with ranks.bench(TORCHELASTIC_RUN_ID="100") as bench:
        killed = bench.ranks("--kill", "1:5")
        other = bench.ranks("--kill", "1:5", script=another)
    assert len(ranks.losses(killed, 1)) == 6, killed
    assert ranks.committed(other) == [8, 8] and len(ranks.losses(other)) == 8, other
    assert [name.startswith("run-100-") for name in ranks.job_ids(killed + other)] == [True, True]
