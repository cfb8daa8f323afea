"""What the loss of a node would cost."""

from __future__ import annotations

import pytest
import torch

from reft._link.job_identity import Layout
from reft._state.discovery import Region, State
from reft._state.node_loss import weakness


def shared(*ranks: int, name: str = "o0.p0") -> Region:
    return Region(name, torch.ones(1), ranks)


@pytest.mark.parametrize(
    ("ranks", "per_node", "why"),
    [
        ((0, 1), 1, ""),
        ((0, 1, 2, 3), 1, ""),
        ((0, 2), 2, ""),  # tensor parallelism within nodes
        ((0, 1, 2, 3), 2, "ranks 0 1 of one node keep the only copies of a shard"),
        ((0, 1), 2, "ranks 0 1 of one node keep the only copies of a shard"),
    ],
)
def test_copies_have_to_lie_on_two_nodes(ranks: tuple[int, ...], per_node: int, why: str) -> None:
    layout = Layout.in_blocks(4, per_node)
    assert weakness(State([shared(*ranks)]), layout, "arc") == why
    assert weakness(State([shared(*ranks)]), layout, "none") != ""


def test_what_one_rank_has_is_lost_with_it() -> None:
    layout = Layout.in_blocks(2, 1)
    buffer = Region("m0.running_mean", torch.ones(1), is_replaceable=True)
    regions = [shared(0, 1), shared(name="o0.p1"), buffer]
    why = "no other rank has 1 tensor of this rank (first: o0.p1)"
    assert weakness(State(regions), layout, "arc") == why
    without = State([regions[0], regions[2]])
    assert weakness(without, layout, "arc") == "", "buffers may be a replica's"
    without.strided = {"m0.w": torch.ones(1), "m0.mask": torch.ones(1)}
    without.replaceable = {"m0.mask"}
    assert weakness(without, layout, "arc").endswith("1 tensor of this rank (first: m0.w)")
