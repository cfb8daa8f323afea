"""Ranks that were started by hand from two shells, with different variables about local ranks."""

from __future__ import annotations

import sys

import pytest

from tests.support import ranks
from tests.support.launchers import free_port


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    "local",
    [
        pytest.param(({}, {}), id="no local ranks"),
        pytest.param(({"LOCAL_RANK": "0"}, {"LOCAL_RANK": "0"}), id="both say 0"),
        pytest.param(({"LOCAL_RANK": "1"}, {"LOCAL_RANK": "2"}), id="nobody says 0"),
        pytest.param(({"NODE_RANK": "0"}, {"NODE_RANK": "1"}), id="one host posing as two"),
    ],
)
def test_ranks_of_two_shells_are_one_job(local: tuple[dict[str, str], dict[str, str]]) -> None:
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    with ranks.bench() as bench:
        # `; true` keeps the shell, which is the parent then.
        shell = ["sh", "-c", f"{sys.executable} {ranks.TRAINING}; true"]
        said = ranks.said_by(
            [
                bench.start_command(shell, **address, **more, RANK=str(rank))
                for rank, more in enumerate(local)
            ]
        )
    assert ranks.committed(said) == [8, 8], said
    assert len(ranks.job_ids(said)) == 1
