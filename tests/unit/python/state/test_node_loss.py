"""What the loss of a node would cost."""

from __future__ import annotations

import pytest
import torch

from reft import _C
from reft._link.job_identity import Layout
from reft._state.discovery import Region, State
from reft._state.node_loss import Survival, survival


def shared(*ranks: int, name: str = "o0.p0") -> Region:
    return Region(name, torch.ones(1), ranks)


def weakness(state: State, layout: Layout, protection: str) -> str:
    return survival(state, layout, protection).why


@pytest.mark.parametrize(
    ("ranks", "per_node", "why"),
    [
        ((0, 1), 1, ""),
        ((0, 1, 2, 3), 1, ""),
        ((0, 2), 2, ""),  # tensor parallelism within nodes
        ((0, 1, 2, 3), 2, ""),  # copies are on the other node
        ((0, 1), 2, "ranks 0 1 are on one node, and a shard is lost with them"),
        ((0, 1, 2, 3), 3, "ranks 0 2 are on one node, and a shard is lost with them"),
    ],
)
def test_copies_have_to_lie_on_two_nodes(ranks: tuple[int, ...], per_node: int, why: str) -> None:
    layout = Layout.in_blocks(4, per_node)
    assert weakness(State([shared(*ranks)]), layout, "arc") == why
    assert weakness(State([shared(*ranks)]), layout, "none").startswith("rank ")


def test_nodes_that_may_be_lost_are_those_of_the_weakest_group() -> None:
    state = State([shared(0, 1, 2, 3, 4, 5), shared(0, 2, name="o0.p1")])
    layout = Layout.in_blocks(6, 1)
    assert survival(State(state.regions[:1]), layout, "arc:2") == Survival(2)
    assert survival(state, layout, "arc:2") == Survival(1)
    assert survival(State([shared(0, 1, 2, 3, 4, 5)]), Layout.in_blocks(6, 2), "arc:2").nodes == 2
    assert survival(State([shared(0, 1, 2, 3, 4, 5)]), Layout.in_blocks(6, 3), "arc:2").nodes == 1


def test_members_of_a_parity_set_have_to_lie_on_different_nodes() -> None:
    state = State([shared(0, 1, 2, 3)])
    assert survival(state, Layout.in_blocks(4, 1), "aec") == Survival(1)
    assert survival(state, Layout.in_blocks(4, 2), "aec") == Survival(1)
    assert weakness(state, Layout.in_blocks(4, 3), "aec").endswith("a shard is lost with them")
    assert weakness(state, Layout.in_blocks(4, 4), "aec").endswith("a shard is lost with them")


def test_parities_need_a_device_that_can_make_them(monkeypatch: pytest.MonkeyPatch) -> None:
    state, layout = State([Region("o0.p0", torch.ones(1), (0, 1))]), Layout.in_blocks(2, 1)
    asked = []

    def hindrance(devices: list[int]) -> str:
        asked.append(devices)
        return "no compiler"

    monkeypatch.setattr(_C, "parity_hindrance", hindrance)
    assert weakness(state, layout, "aec") == (
        "no parities can be made of this rank's state (no compiler): use REFT_SNAPSHOT_PROTECTION=arc"
    )
    assert asked == [[-1]]
    assert weakness(state, layout, "arc") == ""
    assert asked == [[-1]], "only parities are made on devices"


def test_two_launchers_on_one_of_several_hosts_are_lost_together() -> None:
    layout = Layout(((0,), (1,), (2,)), (0, 0, 1))
    assert layout.domain_of == (0, 0, 1)
    assert weakness(State([shared(0, 1)]), layout, "arc") != ""
    assert weakness(State([shared(1, 2)]), layout, "arc") == ""
    assert Layout(((0,), (1,)), (0, 0)).domain_of == (0, 1), "all on one host: nodes count"


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
