"""Which ranks compute each other's optimizers, and what happens to those that cannot be."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.optim import ZeroRedundancyOptimizer

from reft._state import heap, recomputed
from reft._state.constructions import of_process as constructions


@given(st.lists(st.integers(0, 5), min_size=0, max_size=24))
def test_each_rank_is_in_one_set_and_on_another_node_than_the_others_if_it_can_be(nodes: list[int]) -> None:
    ranks = list(range(len(nodes)))
    sets = recomputed.sets_of(ranks, nodes)
    assert sorted(rank for one in sets for rank in one) == (ranks if len(ranks) > 1 else [])
    assert sum(len(one) == 3 for one in sets) == (len(ranks) % 2 if len(ranks) > 1 else 0)
    assert all(len(one) in (2, 3) and list(one) == sorted(one) for one in sets)
    most = max((nodes.count(node) for node in nodes), default=0)
    if most <= (len(ranks) + 1) // 2:
        assert all(len({nodes[rank] for rank in one}) > 1 for one in sets)


def test_ranks_of_a_part_of_the_job_are_paired() -> None:
    assert recomputed.sets_of([1, 3, 5, 7], [0, 0, 0, 0, 1, 1, 1, 1]) == [(1, 5), (3, 7)]


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[recomputed.Recomputation]:
    """One process that stands for rank 0 of two: it computes rank 1's part."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    monkeypatch.setattr(recomputed.dist, "get_process_group_ranks", lambda group: [0, 1])
    found = recomputed.of_process
    found.watch([0, 1])
    yield found
    found.forget()
    dist.destroy_process_group()


def sharded(optimizer: Any, parameters: list[torch.Tensor], **more: Any) -> Any:
    """A ZeroRedundancyOptimizer of two ranks, of which only the first is there."""
    made = ZeroRedundancyOptimizer(parameters, optimizer, lr=0.1)
    halves = [[{"params": part, "lr": 0.1}] for part in (parameters[:1], parameters[1:])]
    made._partition_parameters = lambda: halves
    made.optim = optimizer(halves[0], lr=0.1)
    for name, value in more.items():
        setattr(made, name, value)
    return made


def parameters() -> list[torch.Tensor]:
    made = [torch.nn.Parameter(torch.full((4,), float(i))) for i in range(2)]
    for one in made:
        one.grad = torch.ones(4)
    return made


def step(found: recomputed.Recomputation, outer: Any) -> None:
    found.begin(outer)
    found.begin(outer.optim)
    found.end(outer)


def test_it_computes_what_the_other_rank_keeps(alone: recomputed.Recomputation) -> None:
    weights = parameters()
    outer = sharded(torch.optim.Adam, weights)
    step(alone, outer)
    assert alone.found and alone.ranks_of(outer.optim) == (0, 1)
    (parameter, held, key), = alone.held_beside(outer.optim)
    assert parameter is weights[1] and torch.equal(held[key]["exp_avg"], torch.full((4,), 0.1))
    assert torch.equal(weights[1], torch.ones(4)), "the script's own parameter stays"
    assert alone.take_problems() == []


def test_parameters_are_read_before_their_owners_send_them(alone: recomputed.Recomputation) -> None:
    """The ranks exchange them between the end of the inner step and that of the outer one."""
    weights = parameters()
    outer = sharded(torch.optim.Adam, weights)
    outer.optim.param_groups[0]["weight_decay"] = 0.5
    expected = torch.nn.Parameter(weights[1].detach().clone())
    alike = torch.optim.Adam([expected], lr=0.1, weight_decay=0.5)
    for count in range(6):
        expected.grad = weights[1].grad
        alone.begin(outer)
        alone.begin(outer.optim)
        alike.step()
        alone.end(outer.optim)
        weights[1].data.copy_(expected.data)
        alone.end(outer)
        ((_, held, key),) = alone.held_beside(outer.optim)
        assert torch.equal(held[key]["exp_avg"], alike.state[expected]["exp_avg"]), count
    assert alone.take_problems() == []


def test_another_partition_keeps_what_is_known(alone: recomputed.Recomputation) -> None:
    weights = [torch.nn.Parameter(torch.full((4,), float(i))) for i in range(3)]
    outer = sharded(torch.optim.AdamW, weights)
    for count in range(8):
        for i, weight in enumerate(weights):
            weight.grad = torch.full((4,), 0.3 * i - 0.1 * count)
        if count == 5:
            parts = [[{"params": part, "lr": 0.1}] for part in (weights[:2], weights[2:])]
            outer._partition_parameters = lambda parts=parts: parts
        step(alone, outer)
    ((parameter, held, key),) = alone.held_beside(outer.optim)
    assert parameter is weights[2] and held[key]["step"].item() == 8 and alone.take_problems() == []
    mean = torch.zeros(4)
    for count in range(8):
        mean.lerp_(torch.full((4,), 0.6 - 0.1 * count), 1 - 0.9)
    assert torch.equal(held[key]["exp_avg"], mean)


def test_a_loaded_checkpoint_is_advanced(alone: recomputed.Recomputation) -> None:
    weights = parameters()
    outer = sharded(torch.optim.AdamW, weights)
    for _ in range(4):
        step(alone, outer)
    kept = {name: torch.full((4,), 0.5) for name in ("exp_avg", "exp_avg_sq")} | {"step": torch.tensor(70.0)}
    alone.loaded(outer, {"state": {1: kept}})
    step(alone, outer)
    ((_, held, key),) = alone.held_beside(outer.optim)
    assert held[key]["step"].item() == 71 and alone.take_problems() == []
    assert torch.equal(held[key]["exp_avg"], torch.full((4,), 0.5).lerp(torch.ones(4), 1 - 0.9))
    assert kept["exp_avg"][0] == 0.5, "the checkpoint stays as it is"


def test_what_it_makes_is_not_taken_for_the_scripts(alone: recomputed.Recomputation) -> None:
    constructions.watch()
    count = constructions.count
    outer = sharded(torch.optim.Adam, parameters())
    made = constructions.count - count
    step(alone, outer)
    assert constructions.count - count == made
    gc.collect()
    found = {id(one) for one in heap.live(torch.optim.Optimizer)[0]}
    assert {id(outer), id(outer.optim)} <= found
    replicas = [one for one in gc.get_objects() if type(one) is torch.optim.Adam and constructions.is_own(one)]
    assert replicas, "else this test sees nothing"
    assert not found & {id(one) for one in replicas}


class OfTheScript(torch.optim.SGD):
    pass


class Failing(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        raise ArithmeticError("no")


@pytest.mark.parametrize(("make", "more", "why"), [
    (OfTheScript, {}, "ValueError: OfTheScript may keep more than reft knows of"),
    (Failing, {}, "ArithmeticError: no"),
    (torch.optim.Adam, {"_overlap_with_ddp": True},
     "ValueError: overlap_with_ddp=True steps it inside of the backward pass"),
])  # fmt: skip
def test_what_cannot_be_computed_is_dropped_and_said(
    alone: recomputed.Recomputation, monkeypatch: pytest.MonkeyPatch, make: Any, more: dict[str, Any], why: str
) -> None:
    monkeypatch.setattr(recomputed, "_KINDS", (*recomputed._KINDS, Failing))
    outer = sharded(make, parameters(), **more)
    for _ in range(3):
        step(alone, outer)
    assert alone.take_problems() == [why]
    assert alone.ranks_of(outer.optim) == () and alone.held_beside(outer.optim) == []
    assert alone.found, "there is one; that it is not computed is what was said"


@pytest.mark.parametrize("least", [0, recomputed._IN_PLACE])
def test_after_a_step_that_raised_nothing_is_known(
    alone: recomputed.Recomputation, monkeypatch: pytest.MonkeyPatch, least: int
) -> None:
    monkeypatch.setattr(recomputed, "_IN_PLACE", least)
    outer = sharded(torch.optim.Adam, parameters())
    step(alone, outer)
    alone.begin(outer)
    alone.begin(outer.optim)  # and raises: `end` is never called
    step(alone, outer)
    assert alone.take_problems() == ["ValueError: a step of it has raised"]
    assert alone.held_beside(outer.optim) == []


def test_a_step_that_raised_costs_no_other_optimizer(alone: recomputed.Recomputation) -> None:
    raised, other = sharded(torch.optim.Adam, parameters()), sharded(torch.optim.Adam, parameters())
    alone.begin(raised)
    alone.begin(raised.optim)
    step(alone, other)
    assert alone.take_problems() == ["ValueError: a step of it has raised"]
    assert alone.ranks_of(raised.optim) == () and alone.ranks_of(other.optim) == (0, 1)
    assert len(alone.held_beside(other.optim)) == 1


def test_a_step_with_a_closure_computes_its_own_gradients(alone: recomputed.Recomputation) -> None:
    outer = sharded(torch.optim.Adam, parameters())
    alone.begin(outer, (lambda: 0.0,))
    alone.begin(outer.optim, (lambda: 0.0,))
    alone.end(outer)
    assert alone.take_problems() == ["ValueError: step() was given a closure, or other arguments"]
    assert alone.held_beside(outer.optim) == []


def test_a_step_of_the_inner_optimizer_alone_is_computed_and_has_ended(alone: recomputed.Recomputation) -> None:
    outer = sharded(torch.optim.Adam, parameters())
    step(alone, outer)
    alone.begin(outer.optim)
    alone.end(outer.optim)
    (_, held, key), = alone.held_beside(outer.optim)
    assert held[key]["step"].item() == 2


def test_a_rank_without_parameters_has_nothing_to_be_computed(alone: recomputed.Recomputation) -> None:
    outer = sharded(torch.optim.Adam, parameters()[:1])
    step(alone, outer)
    assert alone.take_problems() == [] and alone.ranks_of(outer.optim) == (0, 1)
    assert alone.held_beside(outer.optim) == []


def test_an_optimizer_whose_group_is_gone_is_left_alone(
    alone: recomputed.Recomputation, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(group: Any) -> list[int]:
        raise ValueError("Invalid process group")

    monkeypatch.setattr(recomputed.dist, "get_process_group_ranks", gone)
    outer = sharded(torch.optim.Adam, parameters())
    step(alone, outer)
    assert alone.take_problems() == ["ValueError: Invalid process group"]
    assert alone.ranks_of(outer.optim) == ()


def test_places_for_a_restore_are_there_before_the_first_step(alone: recomputed.Recomputation) -> None:
    outer = sharded(torch.optim.Adam, parameters())
    alone.prepare([outer, torch.optim.SGD(parameters())])
    (parameter, holder, key), = alone.places_beside(outer.optim)
    assert parameter is outer._partition_parameters()[1][0]["params"][0]
    assert key not in holder and alone.held_beside(outer.optim) == []


def test_training_is_the_same(alone: recomputed.Recomputation, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random state, gradients and parameters are those of the script alone."""
    monkeypatch.setattr(recomputed, "_IN_PLACE", 0)
    weights = parameters()
    outer = sharded(torch.optim.AdamW, weights)
    torch.manual_seed(3)
    for _ in range(3):
        step(alone, outer)
    drawn = torch.rand(3)
    torch.manual_seed(3)
    assert torch.equal(drawn, torch.rand(3))
    assert all(torch.equal(w.grad, torch.ones(4)) for w in weights if w.grad is not None)
    assert [w.tolist() for w in weights] == [[0.0] * 4, [1.0] * 4]


def test_other_optimizers_are_left_alone(alone: recomputed.Recomputation) -> None:
    plain = torch.optim.Adam(parameters())
    alone.begin(plain)
    alone.end(plain)
    assert alone.ranks_of(plain) == () and alone.held_beside(plain) == [] and not alone.found


def test_without_the_setting_nothing_is_computed() -> None:
    found = recomputed.Recomputation()
    found.begin(SimpleNamespace())  # type: ignore[arg-type]
    assert not found.found
