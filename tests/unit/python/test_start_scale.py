"""The start of a job takes a number of store operations that grows with its ranks, not faster."""

from __future__ import annotations

import pytest

from tests.support.start_scale import simulate

LOCAL_WORLD = 8


@pytest.mark.timeout(120)
def test_store_operations_grow_linearly_with_the_ranks() -> None:
    traffic = {nodes * LOCAL_WORLD: simulate(nodes, LOCAL_WORLD) for nodes in (8, 16, 32)}
    for phase in traffic[64]:
        per_rank = [traffic[world][phase].total / world for world in (64, 128, 256)]
        assert max(per_rank) < 1.05 * min(per_rank), (phase, per_rank)
    assert sum(phase.total for phase in traffic[256].values()) < 25 * 256


@pytest.mark.timeout(120)
def test_no_rank_reads_what_every_other_rank_has_written() -> None:
    world = 32 * LOCAL_WORLD
    for name, phase in simulate(32, LOCAL_WORLD).items():
        if name != "replica groups":  # whose first rank compares the digests of its members
            assert phase.busiest < world / 4, name
