"""mp.spawn in a shell of a Slurm step with one task, whose variables each rank inherits; and again
with other arguments after the first ranks were killed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import ranks
from tests.support.launchers import free_port

SCRIPT = """
import sys
import torch.multiprocessing as mp
import short_training


def work(rank, options):
    short_training.train(rank, 2, options)


if __name__ == "__main__":
    for trial in sys.argv[1:]:
        print("trial", trial, flush=True)
        try:
            mp.spawn(work, args=(short_training.arguments(trial.split()),), nprocs=2)
        except mp.ProcessExitedException:
            print("killed", flush=True)
"""
SHELL = {
    "JOB_ID": "4711", "STEP_ID": "0", "NODEID": "0", "LOCALID": "0", "PROCID": "0", "NTASKS": "1",
    "NTASKS_PER_NODE": "1", "NNODES": "1",
}  # fmt: skip


@pytest.mark.timeout(300)
def test_spawned_ranks_are_one_node_and_trials_do_not_mix(tmp_path: Path) -> None:
    script = tmp_path / "spawn.py"
    script.write_text(SCRIPT)
    slurm = {f"SLURM_{name}": value for name, value in SHELL.items()}
    trials = [
        f"--init tcp://127.0.0.1:{free_port()} --lr 0.1 --kill 1:5",
        f"--init tcp://127.0.0.1:{free_port()} --lr 0.2",
    ]
    with ranks.bench(**slurm) as bench:
        said = bench.run(script, *trials)
    first, second = said.split("trial --init")[1:]
    assert "killed" in first and len(ranks.losses(first)) >= 5, said
    assert ranks.committed(second) == [8, 8], said
    assert len(ranks.losses(second)) == 8 and "resum" not in second, said
    assert "is kept for that job" in second, said
    assert len(set(ranks.job_ids(said))) == 2


@pytest.mark.timeout(300)
def test_ranks_that_are_spawned_again_after_a_clean_end_start_anew(tmp_path: Path) -> None:
    """The agent of the first ones may be about to end."""
    script = tmp_path / "spawn.py"
    script.write_text(SCRIPT)
    with ranks.bench() as bench:
        said = bench.run(script, *[f"--init tcp://127.0.0.1:{free_port()}"] * 2)
    assert ranks.committed(said) == [8] * 4 and "resum" not in said, said
    assert len(ranks.losses(said)) == 16
