"""The plan of a vault: when it is made anew, what other ranks are asked for, what does not fit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from reft import _C
from reft._link import host_memory
from reft._session.planner import Planner
from reft._state import discovery, replica_groups
from tests.fakes.native import FakeEngine
from tests.support.jobs import job


class Plans:
    """A planner whose other ranks answer as a test says.

    Attributes:
        asked: names of the regions of each confirmation.
        different: what the confirmations report.
        state: what a discovery finds.
    """

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, env: dict[str, Any], rank: int = 0, world: int = 2
    ) -> None:
        self.engine = FakeEngine()
        self.asked: list[list[str]] = []
        self.different: list[str] = []
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

    def _discover(self, optimizers: Any) -> discovery.State:
        self.discoveries += 1
        found = [discovery.Region(name, tensor, ranks) for name, tensor, ranks in self.regions]
        return discovery.State(regions=found, optimizers=list(optimizers))

    def _confirm(self, regions: list[discovery.Region], store: Any, rank: int) -> Any:
        self.asked.append([region.name for region in regions])
        for region in regions:
            if region.name in self.different:
                region.ranks = ()
        groups = sorted({region.ranks for region in regions if region.ranks})
        return [("g" + "-".join(map(str, ranks)), ranks) for ranks in groups], self.different

    def refresh(self) -> bool:
        return self.planner.refresh([self.optimizer])

    def replace_state(self) -> None:
        """As an optimizer does that puts another tensor into its state."""
        parameter = self.optimizer.param_groups[0]["params"][0]
        self.optimizer.state[parameter]["buf"] = torch.zeros(1)


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
    made.regions.append(("o0.p0.buf", torch.zeros(1), (0, 1)))
    made.planner.forget()
    made.refresh()
    assert made.asked[1:] == [["o0.p0", "o0.p0.buf"]]


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
        assert [(name, group) for name, _, group, _ in regions] == [("o0.p0", 0), ("m0.mean", -1)]
        assert groups == [("g0-1", [0, 1])]
    said = capsys.readouterr().err.splitlines()
    assert said == [
        "reft: warning: 1 replicated tensor not equal on all ranks (first: m0.mean); each rank saves"
        " its own"
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
    assert [early for _, _, _, early in made.engine.tables[-1][0]] == [True]
    made.planner.forget()
    made.refresh()
    assert [early for _, _, _, early in made.engine.tables[-1][0]] == [True], "for good"


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
    made.replace_state()
    made.refresh()
    assert before.schedulers == [] and made.planner.state is not before


@pytest.mark.parametrize(
    ("protection", "slots", "needed"),
    [
        ("none", "2", "4.0 KiB"),  # 2 ranks share 2048 bytes: 1 KiB a rank, 2 slots, 2 ranks
        ("arc", "2", "8.0 KiB"),  # and a copy of the next one's share
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
    monkeypatch.setattr(host_memory, "available_bytes", lambda vault_dir: 4096 / 0.9 - 1)
    with pytest.raises(_C.Unavailable):
        made.refresh()
    monkeypatch.setattr(host_memory, "available_bytes", lambda vault_dir: 4096 / 0.9 + 1)
    assert made.refresh()
