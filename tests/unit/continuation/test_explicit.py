"""`reft.resume` without a process group, and the rule that tells a script's own newer checkpoint."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

torch = pytest.importorskip("torch")

from reft._resume import explicit, own_checkpoints  # noqa: E402
from reft._state import registry  # noqa: E402
from reft._state.constructions import Constructions  # noqa: E402


@pytest.fixture(autouse=True)
def nothing_made_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tests of the process may have had reft number what scripts make."""
    monkeypatch.setattr(own_checkpoints, "of_process", Constructions())


@pytest.fixture(autouse=True)
def empty_registry() -> Iterator[None]:
    before = dict(registry.objects)
    registry.objects.clear()
    yield
    registry.objects.clear()
    registry.objects.update(before)


def test_defaults_without_a_snapshot() -> None:
    state = explicit.resume({"epoch": 0, "best": None}, {})
    assert (state.epoch, state.best) == (0, None)
    state.epoch = 3
    assert registry.objects[explicit.NAME].state_dict() == {"epoch": 3, "best": None}


def test_values_of_the_snapshot_win_and_new_names_take_defaults() -> None:
    state = explicit.resume({"epoch": 0, "added": 7}, {explicit.NAME: {"epoch": 5, "gone": 1}})
    assert state.state_dict() == {"epoch": 5, "added": 7}


def test_second_call_adds_names_and_keeps_values() -> None:
    first = explicit.resume({"epoch": 0}, {})
    first.epoch = 4
    second = explicit.resume({"epoch": 0, "step": 1}, {})
    assert second is first
    assert second.state_dict() == {"epoch": 4, "step": 1}


def test_the_snapshot_is_put_back_at_the_first_step() -> None:
    state = explicit.resume({"epoch": 0}, {explicit.NAME: {"epoch": 5}})
    state.epoch = 6  # by the iteration that is thrown away
    state.load_state_dict({"epoch": 5})
    assert state.epoch == 5


@pytest.mark.parametrize("name", ["_hidden", "state_dict"])
def test_names_that_cannot_be_attributes_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        explicit.resume({name: 0}, {})


def run(steps: int, start: dict[str, object] | None = None) -> tuple[list[torch.optim.Optimizer], list[object]]:
    weight = torch.nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.AdamW([weight])
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)
    if start is not None:
        optimizer.load_state_dict(start)  # type: ignore[arg-type]
    for _ in range(steps):
        weight.grad = torch.ones(2)
        optimizer.step()
        scheduler.step()
    return [optimizer], [scheduler]


def test_snapshot_wins_over_an_older_or_no_checkpoint() -> None:
    saved = own_checkpoints.counts(*run(20))
    assert saved == {"optimizer 0": 20.0, "scheduler 0": 20.0}
    assert own_checkpoints.newer(own_checkpoints.counts(*run(1)), saved) is None
    older = own_checkpoints.counts(run(1, run(10)[0][0].state_dict())[0], [])
    assert older == {"optimizer 0": 11.0}
    assert own_checkpoints.newer(older, saved) is None
    same = own_checkpoints.counts(run(1, run(20)[0][0].state_dict())[0], [])
    assert same == {"optimizer 0": 21.0}
    assert own_checkpoints.newer(same, saved) is None


def test_schedulers_that_nothing_tells_apart_are_not_counted() -> None:
    optimizers, first = run(2)
    _, second = run(5)
    assert own_checkpoints.counts(optimizers, first + second) == {"optimizer 0": 2.0}


def test_checkpoint_of_the_script_that_is_ahead_wins() -> None:
    live = own_checkpoints.counts(run(1, run(30)[0][0].state_dict())[0], [])
    why = own_checkpoints.newer(live, own_checkpoints.counts(*run(20)))
    assert why is not None
    assert "31" in why
    assert "20" in why


def test_counts_that_disagree_or_are_absent_decide_nothing() -> None:
    assert (
        own_checkpoints.newer({"optimizer 0": 9.0, "scheduler 0": 1.0}, {"optimizer 0": 3.0, "scheduler 0": 3.0})
        is None
    )
    assert own_checkpoints.newer({}, {"optimizer 0": 3.0}) is None
    sgd = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])
    assert own_checkpoints.counts([sgd], []) == {}
