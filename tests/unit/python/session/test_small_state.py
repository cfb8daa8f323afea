"""Small state: what a rank pickles at a program point, and what of it comes back."""

from __future__ import annotations

import inspect
from types import FrameType
from typing import Any

import torch
import torch.nn.utils.prune

from reft._session import small_state
from reft._session.small_state import Saved, SmallState
from reft._state import constructions, discovery, registry
from tests.support.boundaries import boundary_of

Failures = list[tuple[str, Exception]]


def here() -> FrameType:
    frame = inspect.currentframe()
    assert frame is not None and frame.f_back is not None
    return frame.f_back


def model() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A module and its optimizer after a step."""
    module = torch.nn.Linear(2, 2)
    optimizer = torch.optim.Adam(module.parameters(), lr=0.5)
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return module, optimizer


def state_of(*optimizers: torch.optim.Optimizer, **more: Any) -> discovery.State:
    return discovery.State(optimizers=list(optimizers), **more)


def captured(
    state: discovery.State, failures: Failures, exact: bool = False, step: int = 3
) -> Saved:
    small = SmallState(2, exact, 1 << 20, lambda what, error: failures.append((what, error)))
    small.planned(state, boundary_of(state.optimizers))
    saved = small_state.read(small.capture(here(), step, boundary_of(state.optimizers), state).pickled)
    return small_state.opened(saved, small_state.finder_in(state))


def test_what_optimizers_keep_beside_tensors_is_plain() -> None:
    failures: Failures = []
    module, optimizer = model()
    optimizer.param_groups[0]["capturable_lr"] = torch.tensor(0.5)
    optimizer.state[module.bias]["history"] = [1, 2]  # type: ignore[index, union-attr]
    state = discovery.discover([optimizer])
    saved = captured(state, failures)
    assert failures == [] and (saved["step"], saved["session"]) == (3, 2)
    group = saved["groups"][0][0]
    assert group["lr"] == 0.5 and group["betas"] == ("tuple", [0.9, 0.999])
    assert "params" not in group
    assert group["capturable_lr"] == ("tensor", "o0.g0.capturable_lr", "cpu")
    kind, entries = saved["plain_state"][0]
    weight, bias = (("object", "parameter", f"m0.{name}") for name in ("weight", "bias"))
    assert kind == "dict" and [key for key, _ in entries] == [weight, bias]
    assert dict(dict(entries)[bias][1])["history"] == ("list", [1, 2])
    assert dict(dict(entries)[weight][1])["step"] == ("tensor", "o0[m0.weight].step", "cpu")


def test_an_optimizer_that_keeps_tensors_only_is_pickled_once() -> None:
    module, optimizer = model()
    state = discovery.discover([optimizer])
    small = SmallState(2, False, 1 << 20, lambda what, error: None)
    small.planned(state, boundary_of(state.optimizers))
    assert set(small._fixed) == {0}
    optimizer.state[module.bias]["count"] = 1  # type: ignore[index, union-attr]
    small.planned(state, boundary_of(state.optimizers))
    assert small._fixed == {}


def test_tensors_with_gaps_are_saved_by_value() -> None:
    _, optimizer = model()
    base = torch.arange(8.0)
    strided = base[::2]
    saved = captured(state_of(optimizer, strided={"r.x": strided}), [])
    base.zero_()
    lost = small_state.restore_strided(
        saved, state_of(optimizer, strided={"r.x": strided, "r.y": base})
    )
    assert base.tolist() == [0, 0, 2, 0, 4, 0, 6, 0]
    assert lost == [("tensor r.y", "", "it was not saved")]


def test_a_scheduler_is_saved_without_the_optimizer_that_it_holds() -> None:
    _, optimizer = model()

    class Owner(torch.optim.lr_scheduler.StepLR):
        def state_dict(self) -> dict[str, Any]:
            return {
                "last_epoch": self.last_epoch,
                "whose": self.optimizer,
                "all": [[self.optimizer]],
            }

    scheduler = Owner(optimizer, 1)
    saved = captured(state_of(optimizer, schedulers=[scheduler]), [])
    assert saved["schedulers"] == [("Owner", {"last_epoch": 0})]


def test_schedulers_come_back_by_their_keys_and_the_others_are_named() -> None:
    _, optimizer = model()
    constructions.of_process.watch()
    one = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    two = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    keys = ["none of now", *small_state.keys_of([two, one])]
    rows = [
        ("CosineAnnealingLR", {}),
        ("ExponentialLR", two.state_dict() | {"last_epoch": 3}),
        ("StepLR", one.state_dict() | {"last_epoch": 7}),
    ]
    lost = small_state.restore_state_dicts("scheduler", [one, two], rows, keys)
    assert (one.last_epoch, two.last_epoch) == (7, 3)
    assert lost == [("scheduler CosineAnnealingLR", "", "made after the first step")]


def test_a_scheduler_that_replaced_another_one_goes_into_the_one_of_its_class() -> None:
    _, optimizer = model()
    constructions.of_process.watch()
    one = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    two = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    keys = [*small_state.keys_of([two]), "of a later one"]
    later = one.state_dict() | {"last_epoch": 9}
    rows = [("ExponentialLR", two.state_dict() | {"last_epoch": 3}), ("StepLR", later)]
    assert small_state.restore_state_dicts("scheduler", [one, two], rows, keys) == []
    assert (one.last_epoch, two.last_epoch) == (9, 3)
    rows[1] = ("ExponentialLR", later)
    lost = small_state.restore_state_dicts("scheduler", [one, two], rows, keys)
    why = "made after the first step, where the script has a StepLR"
    assert lost == [("scheduler ExponentialLR", "", why)] and two.last_epoch == 3


def test_a_state_dict_that_is_refused_is_named() -> None:
    class Picky:
        def load_state_dict(self, values: dict[str, Any]) -> None:
            raise KeyError("growth")

    lost = small_state.restore_state_dicts("gradient scaler", [Picky()], [("Picky", {})], [""])
    assert lost == [("gradient scaler Picky", "", "KeyError: 'growth'")]


class Counter:
    def __init__(self, value: Any = 0) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, values: dict[str, Any]) -> None:
        self.value = values["value"]


def test_registered_objects_come_back_if_they_are_registered_again() -> None:
    _, optimizer = model()
    counter = Counter(5)
    registry.objects.update(counter=counter, weights=torch.nn.Linear(1, 1), plain=torch.zeros(1))
    saved = captured(state_of(optimizer), [])
    assert saved["registered"] == {"counter": {"value": 5}}, "modules and tensors are regions"
    saved["registered"]["gone"] = {"value": 1}
    counter.value = 0
    small_state.restore_registered(saved)
    assert counter.value == 5


def test_an_optimizer_in_the_place_of_another_one_is_named() -> None:
    """A restarted script steps the first one when it resumes."""
    module, optimizer = model()
    small = SmallState(2, False, 1 << 20, lambda what, error: None)
    for one, named in ((optimizer, 0), (torch.optim.SGD(module.parameters(), 0.1), 1)):
        state = state_of(one)
        small.planned(state, boundary_of(state.optimizers))
        small.capture(here(), 3, boundary_of(state.optimizers), state)
        assert len(small.unsaved) == named
    ((what, kind, why),) = small.unsaved
    assert (what, kind) == ("optimizer 0", "SGD") and "start from its beginning" in why


def test_what_cannot_be_pickled_costs_the_place_in_the_loop_only(monkeypatch: Any) -> None:
    _, optimizer = model()
    failures: Failures = []

    def capture(*_: Any) -> dict[str, Any]:
        return {"uncaptured": [("a", "b", "c")], "assumed": [], "frames": lambda: None}

    monkeypatch.setattr(small_state._continuation, "capture", capture)
    saved = captured(state_of(optimizer), failures, exact=True)
    assert "frames" not in saved and saved["step"] == 3
    assert [what for what, _ in failures] == ["small state"]


def test_values_that_are_left_out_are_known(monkeypatch: Any) -> None:
    _, optimizer = model()
    left_out = [("main:reader", "csv.reader", "iterator of unknown kind")]
    monkeypatch.setattr(small_state._continuation, "capture", lambda *_: {"uncaptured": left_out, "assumed": []})
    small = SmallState(1, True, 1 << 20, lambda what, error: None)
    state = state_of(optimizer)
    small.planned(state, boundary_of(state.optimizers))
    small.capture(here(), 1, boundary_of(state.optimizers), state)
    assert small.uncaptured == left_out


def test_tensors_of_regions_are_not_captured_a_second_time(monkeypatch: Any) -> None:
    module, optimizer = model()
    seen: list[Any] = []

    def capture(
        frame: Any,
        limit: int,
        owned: set[int],
        storages: frozenset[int],
        parts: Any,
        groups: frozenset[int],
        elsewhere: str,
    ) -> Any:
        seen.append((limit, owned, storages, groups))
        return {"uncaptured": [], "assumed": []}

    monkeypatch.setattr(small_state._continuation, "capture", capture)
    weight = next(module.parameters())
    state = state_of(optimizer, regions=[discovery.Region("o0.p0", weight.detach())])
    captured(state, [], exact=True)
    ((limit, owned, storages, groups),) = seen
    assert groups == {id(group) for group in optimizer.param_groups}
    assert limit == 1 << 20 and {id(weight), id(optimizer)} <= owned
    assert storages == {weight.untyped_storage().data_ptr()}


def test_a_parameter_that_a_restarted_script_begins_without_is_named() -> None:
    def unsaved() -> list[str]:
        state = discovery.discover([optimizer])
        small.planned(state, boundary_of(state.optimizers))
        small.capture(here(), 3, boundary_of(state.optimizers), state)
        kept = [(name.partition(".")[2], why) for name, _, why in small.unsaved]
        return [f"{name} {why.partition(' in ')[0].partition(' than')[0]}" for name, why in kept]

    small = SmallState(2, False, 1 << 20, lambda what, error: None)
    module = torch.nn.Sequential(
        torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2), torch.nn.LazyLinear(2)
    )
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    for parameter in module[:2].parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert unsaved() == []
    torch.nn.utils.prune.l1_unstructured(module[0], "weight", amount=1)
    assert unsaved() == ["0.weight a parameter"]
    torch.nn.utils.prune.remove(module[0], "weight")
    assert unsaved() == []
    module[1].running_mean = torch.ones(3)  # comes back as another one
    assert unsaved() == []
    module[1].bfloat16()
    assert sorted(unsaved()) == [
        "1.bias of another shape or dtype",
        "1.running_mean of another shape or dtype",
        "1.running_var of another shape or dtype",
        "1.weight of another shape or dtype",
    ]
