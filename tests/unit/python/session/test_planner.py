"""The plan of a vault: when it is made anew, what other ranks are asked for, what does not fit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from reft import _C
from reft._link import host_memory
from reft._session.planner import Planner
from reft._state import constructions, discovery, replica_groups
from reft._state.replica_groups import group_id
from tests.fakes.native import FakeEngine
from tests.support.jobs import job


class Plans:
    """A planner whose other ranks answer as a test says.

    Attributes:
        asked: names of the regions of each confirmation that are expected to be shared.
        plans: names of the plans.
        different, odd: what the confirmations report.
        state: what a discovery finds.
    """

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, env: dict[str, Any], rank: int = 0, world: int = 2
    ) -> None:
        self.engine = FakeEngine()
        self.asked: list[list[str]] = []
        self.plans: list[str] = []
        self.different: list[str] = []
        self.odd: tuple[int, ...] = ()
        self.optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(4))], lr=0.1)
        self.regions = [("o0.p0", torch.zeros(4), tuple(range(world)))]
        self.discoveries = 0
        self.planner = Planner(
            env,
            job(rank, world),
            None,
            self.engine,  # type: ignore[arg-type]
        )
        monkeypatch.setattr(discovery, "discover", self._discover)
        monkeypatch.setattr(replica_groups, "confirm", self._confirm)

    def _discover(self, optimizers: Any, before: Any = None) -> discovery.State:
        self.discoveries += 1
        found = [
            discovery.Region(name, tensor, ranks, is_replaceable=name.startswith("m0."))
            for name, tensor, ranks in self.regions
        ]
        return discovery.State(regions=found, optimizers=list(optimizers))

    def _confirm(self, regions: list[discovery.Region], store: Any, rank: int, plan: str) -> Any:
        self.asked.append([region.name for region in regions if region.ranks])
        self.plans.append(plan)
        found = [r for r in regions if r.ranks and r.name in self.different]
        different = [
            replica_groups.Difference(
                ranks, tuple(r.name for r in found if r.ranks == ranks), False, odd=self.odd
            )
            for ranks in sorted({r.ranks for r in found})
        ]
        for region in found:
            region.ranks = ()
        groups = sorted({region.ranks for region in regions if region.ranks})
        return [(group_id(ranks), ranks) for ranks in groups], different

    def refresh(self) -> bool:
        return self.planner.refresh([self.optimizer])

    def replace_state(self) -> None:
        """As an optimizer does that puts one more tensor into its state."""
        parameter = self.optimizer.param_groups[0]["params"][0]
        self.optimizer.state[parameter][f"buf{self.discoveries}"] = torch.zeros(1)


@pytest.fixture
def plans(
    monkeypatch: pytest.MonkeyPatch, settings: Callable[..., dict[str, Any]]
) -> Callable[..., Plans]:
    def make(rank: int = 0, world: int = 2, **values: str) -> Plans:
        return Plans(monkeypatch, settings(**values), rank, world)

    return make


def test_a_plan_holds_until_tensors_are_replaced(plans: Callable[..., Plans]) -> None:
    made = plans()
    assert made.refresh() and not made.refresh()
    made.replace_state()
    assert made.refresh()
    assert made.discoveries == len(made.engine.tables) == 2


def test_no_other_rank_is_asked_while_names_and_shapes_stay(plans: Callable[..., Plans]) -> None:
    made = plans()
    made.refresh()
    made.replace_state()
    made.refresh()
    assert made.asked == [["o0.p0"]]
    assert made.engine.tables[0][1] == made.engine.tables[1][1] == [("g0-1", [0, 1])]
    assert made.engine.asks == [False, False]


def grow(made: Plans, elements: int = 1) -> None:
    made.refresh()
    made.regions.append(("o0.p0.buf", torch.zeros(elements), (0, 1)))
    made.planner.forget()
    made.refresh()


def test_new_state_is_private_until_all_ranks_plan(plans: Callable[..., Plans]) -> None:
    made = plans()
    grow(made)
    regions, groups = made.engine.tables[-1]
    assert [(name, group) for name, _, group, *_ in regions] == [("o0.p0", 0), ("o0.p0.buf", -1)]
    assert groups == [("g0-1", [0, 1])]
    assert made.engine.asks == [False, True] and made.plans == ["first"]
    made.planner.plan_together([made.optimizer], 7, parted=False)
    assert made.plans == ["first", "7"] and made.asked[-1] == ["o0.p0", "o0.p0.buf"]
    assert [group for _, _, group, *_ in made.engine.tables[-1][0]] == [0, 0]
    assert made.engine.asks[-1] is False and not made.refresh()


def test_much_new_state_waits_for_the_plan_of_all_ranks(plans: Callable[..., Plans]) -> None:
    made = plans()
    grow(made, elements=8 << 20)
    assert made.planner.waiting and len(made.engine.tables) == 1
    assert made.refresh() and made.planner.waiting, "it asks until it has a plan"
    made.planner.plan_together([made.optimizer], 7, parted=False)
    assert not made.planner.waiting and len(made.engine.tables) == 2


def test_private_state_needs_no_other_rank(plans: Callable[..., Plans]) -> None:
    made = plans()
    made.refresh()
    made.regions.append(("o0.p1.buf", torch.zeros(1), ()))
    made.planner.forget()
    made.refresh()
    assert made.engine.asks == [False, False] and made.plans == ["first"]


def test_state_that_is_gone_leaves_its_group(plans: Callable[..., Plans]) -> None:
    made = plans()
    made.regions.append(("o0.p1", torch.zeros(2), (0, 1)))
    made.refresh()
    made.regions = [("o0.p0", torch.zeros(4), (0, 1))]
    made.planner.forget()
    made.refresh()
    assert [(n, g) for n, _, g, *_ in made.engine.tables[-1][0]] == [("o0.p0", 0)]


def test_replicas_that_parted_are_private_for_good(
    plans: Callable[..., Plans], capsys: pytest.CaptureFixture[str]
) -> None:
    made = plans()
    made.refresh()
    made.different = ["o0.p0"]
    made.planner.plan_together([made.optimizer], 4, parted=True)
    made.different = []
    made.planner.plan_together([made.optimizer], 9, parted=False)
    assert made.asked == [["o0.p0"], ["o0.p0"], []]
    assert [group for _, _, group, *_ in made.engine.tables[-1][0]] == [-1]
    assert capsys.readouterr().err.splitlines() == [
        "reft: warning: step 4 was not committed: 1 replicated tensor not equal on"
        " ranks 0 1 (first: o0.p0); each rank saves its own"
    ]


@pytest.mark.parametrize("was_equal", [False, True])
def test_a_replica_that_is_odd_is_named(
    plans: Callable[..., Plans], capsys: pytest.CaptureFixture[str], was_equal: bool
) -> None:
    made = plans(world=4)
    if was_equal:
        made.refresh()
    made.different, made.odd = ["o0.p0"], (2,)
    made.planner.plan_together([made.optimizer], 4, parted=True)
    (said,) = capsys.readouterr().err.splitlines()
    named = "each rank saves its own. Rank 2 has other bytes than the rest"
    assert said.endswith(
        f"{named}: unless the script means that, check the memory there" if was_equal else named
    )


def test_an_odd_replica_is_named_after_others_parted(
    plans: Callable[..., Plans], capsys: pytest.CaptureFixture[str]
) -> None:
    made = plans(world=4)
    made.regions.append(("m0.mean", torch.zeros(2), (0, 1, 2, 3)))
    made.different = ["m0.mean"]
    made.planner.plan_together([made.optimizer], 4, parted=True)
    made.different, made.odd = ["o0.p0"], (2,)
    made.planner.plan_together([made.optimizer], 7, parted=True)
    first, second = capsys.readouterr().err.splitlines()
    assert "m0.mean" in first and "o0.p0" in second and "Rank 2 has" in second


def test_what_parts_again_and_again_is_shared_no_longer(plans: Callable[..., Plans]) -> None:
    made = plans()
    made.refresh()
    for step in (4, 8, 12):
        assert made.engine.tables[-1][1] == [("g0-1", [0, 1])]
        made.planner.plan_together([made.optimizer], step, parted=True)
    assert made.engine.tables[-1][1] == []


def test_what_was_found_to_differ_stays_private(
    plans: Callable[..., Plans], capsys: pytest.CaptureFixture[str]
) -> None:
    made = plans()
    made.regions.append(("m0.mean", torch.zeros(2), (0, 1)))
    made.different = ["m0.mean"]
    made.refresh()
    made.replace_state()
    made.refresh()
    for regions, groups in made.engine.tables:
        assert [(name, group) for name, _, group, *_ in regions] == [("o0.p0", 0), ("m0.mean", -1)]
        assert [is_replaceable for *_, is_replaceable in regions] == [False, True]
        assert groups == [("g0-1", [0, 1])]
    said = capsys.readouterr().err.splitlines()
    assert said == [
        "reft: warning: 1 replicated tensor not equal on ranks 0 1 (first: m0.mean);"
        " each rank saves its own"
    ]


def test_other_ranks_do_not_repeat_what_differs(
    plans: Callable[..., Plans], capsys: pytest.CaptureFixture[str]
) -> None:
    made = plans(rank=1)
    made.different = ["o0.p0"]
    made.refresh()
    assert capsys.readouterr().err == ""


def test_the_last_copy_ends_before_the_vault_is_laid_out(plans: Callable[..., Plans]) -> None:
    made = plans()
    made.refresh()
    assert made.engine.calls == ["gate", "set_table"]


def test_a_region_is_copied_early_once_it_was_caught(plans: Callable[..., Plans]) -> None:
    made = plans()
    assert made.planner.copy_early(0) is None, "there is no plan yet"
    made.refresh()
    assert made.planner.copy_early(5) is None
    assert made.planner.copy_early(0) == "o0.p0"
    assert made.refresh(), "planned anew, though no tensor was replaced"
    assert [early for _, _, _, early, _ in made.engine.tables[-1][0]] == [True]
    made.planner.forget()
    made.refresh()
    assert [early for _, _, _, early, _ in made.engine.tables[-1][0]] == [True], "for good"


def test_what_a_resume_has_found_is_planned_once(plans: Callable[..., Plans]) -> None:
    made = plans()
    found = made._discover([made.optimizer])
    made.planner.keep_restored([made.optimizer], found)
    made.refresh()
    assert made.planner.state is found and made.discoveries == 1
    made.planner.forget()
    made.refresh()
    assert made.planner.state is not found


def test_what_a_resume_has_found_is_found_again_if_tensors_were_replaced(
    plans: Callable[..., Plans],
) -> None:
    made = plans()
    found = made._discover([made.optimizer])
    made.planner.keep_restored([made.optimizer], found)
    made.replace_state()
    made.refresh()
    assert made.planner.state is not found and made.discoveries == 2


def test_replaced_schedulers_are_let_go(plans: Callable[..., Plans]) -> None:
    made = plans()
    made.refresh()
    before = made.planner.state
    assert before is not None
    before.schedulers = [object()]
    constructions.of_process.add(made.optimizer)
    made.refresh()
    assert before.schedulers == [] and made.planner.state is not before


@pytest.mark.parametrize(
    ("protection", "slots", "needed"),
    [
        ("none", "2", "4.0 KiB"),  # 2 ranks share 2048 bytes: 1 KiB a rank, 2 slots, 2 ranks
        ("arc", "2", "8.0 KiB"),  # and a copy of the next one's share
        ("aec", "2", "8.0 KiB"),  # two replicas: the parity is the other one's share
        ("none", "3", "6.0 KiB"),
    ],
)
def test_a_plan_that_does_not_fit_is_refused_with_figures(
    plans: Callable[..., Plans], protection: str, slots: str, needed: str
) -> None:
    made = plans(
        REFT_SNAPSHOT_PROTECTION=protection,
        REFT_SNAPSHOT_SLOTS=slots,
        REFT_SNAPSHOT_HOST_BYTES="1000",
    )
    made.regions = [("o0.p0", torch.zeros(512), (0, 1))]
    with pytest.raises(_C.Unavailable) as refused:
        made.refresh()
    assert str(refused.value).startswith(f"snapshots need {needed} of host memory on this node")
    assert "but the limit is 1000 B" in str(refused.value)
    assert made.engine.tables == [] and made.planner.state is None


def test_memory_that_the_vaults_have_already_counts(plans: Callable[..., Plans]) -> None:
    made = plans(REFT_SNAPSHOT_HOST_BYTES="1000")
    made.regions = [("o0.p0", torch.zeros(512), (0, 1))]
    made.engine.counters["slot_bytes"] = 2048
    assert made.refresh()


def test_the_default_limit_is_a_share_of_what_is_available(
    plans: Callable[..., Plans], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = plans()
    made.regions = [("o0.p0", torch.zeros(512), (0, 1))]
    monkeypatch.setattr(host_memory, "growth_bytes", lambda: 0)
    room(monkeypatch, 4550)
    with pytest.raises(_C.Unavailable):
        made.refresh()
    room(monkeypatch, 4552)
    assert made.refresh()


def test_memory_that_the_ranks_had_at_their_peak_is_theirs(
    plans: Callable[..., Plans], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = plans()
    made.regions = [("o0.p0", torch.zeros(512), (0, 1))]
    room(monkeypatch, 10_000)
    monkeypatch.setattr(host_memory, "growth_bytes", lambda: 10_000)
    with pytest.raises(_C.Unavailable):
        made.refresh()
    monkeypatch.setattr(host_memory, "growth_bytes", lambda: 100)
    assert made.refresh()


def test_small_state_counts(plans: Callable[..., Plans]) -> None:
    made = plans(REFT_SNAPSHOT_HOST_BYTES="5000")
    made.regions = [("o0.p0", torch.zeros(512), (0, 1))]
    made.engine.counters["object_bytes"] = 1000
    with pytest.raises(_C.Unavailable):
        made.refresh()


def test_numbers_are_reported_where_it_is_tight(
    plans: Callable[..., Plans], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    made = plans()
    made.regions = [("o0.p0", torch.zeros(512), (0, 1))]
    monkeypatch.setattr(host_memory, "growth_bytes", lambda: 0)
    room(monkeypatch, 5000)
    assert made.refresh()
    assert "memory of the test leaves for them" in " ".join(capfd.readouterr().err.split())


def room(monkeypatch: pytest.MonkeyPatch, usable: int) -> None:
    """Has the node leave so many bytes."""
    found = host_memory.Room(usable, 0, "memory of the test")
    monkeypatch.setattr(host_memory, "tightest", lambda: found)
