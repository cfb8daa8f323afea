"""REFT_SNAPSHOT_PROTECTION=auto: objections to protections, and what all ranks then choose."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch

from reft import _C
from reft._link.job_identity import Layout
from reft._link.trusted_store import ROUND, TrustedStore
from reft._session import protection_choice
from reft._session.protection_choice import CANDIDATES, Facts, ProtectionChoice, objections
from reft._state.discovery import Region, State
from tests.fakes.native import FakeEngine
from tests.support.jobs import job, trusted

FOUR_NODES = Layout.in_blocks(4, 1)
ALL = (0, 1, 2, 3)


def facts(
    ranks: tuple[int, ...] = ALL,
    is_sharded: bool = False,
    not_recomputed: str = "",
    no_copies: str = "",
    short: tuple[str, ...] = (),
) -> Facts:
    """Of a rank whose only tensor is shared by `ranks`. `short`: what has no memory."""
    state = State(regions=[Region("o0.p0", torch.zeros(4), ranks)])
    return Facts(
        state,
        is_sharded,
        not_recomputed,
        no_copies,
        {"aec": 4 / 3, "arc": 2.0}.__getitem__ if len(ranks) > 2 else lambda _: 2.0,
        lambda protection: "no memory" if protection in short else "",
    )


def choose(
    ranks: list[Facts],
    per_node: int = 1,
    store: TrustedStore | None = None,
    env: dict[str, Any] | None = None,
) -> list[ProtectionChoice]:
    """All ranks choose at a time."""
    shared = store or trusted()
    settings = env or {"snapshot_overhead_percent": 0, "snapshot_every": 1}
    choices = [
        ProtectionChoice(settings, job(rank, len(ranks), per_node), shared)
        for rank in range(len(ranks))
    ]
    with ThreadPoolExecutor(len(ranks)) as pool:
        list(pool.map(ProtectionChoice.choose, choices, ranks, ["first"] * len(ranks)))
    return choices


@pytest.mark.parametrize(
    ("rank", "chosen"),
    [
        (facts(), "aec"),
        (facts(short=("aec",)), "arc"),
        (facts(ranks=()), "peer"),  # no replica
        (facts(ranks=(0, 1)), "arc"),  # a parity of one other rank saves nothing
        (facts(is_sharded=True), "aor"),
        (facts(is_sharded=True, not_recomputed="LBFGS"), "peer"),
        (facts(ranks=(), no_copies="no way"), "none"),
        (facts(short=CANDIDATES), "none"),
    ],
)
def test_what_is_chosen_follows_from_the_state(rank: Facts, chosen: str) -> None:
    assert [one.chosen for one in choose([rank] * 4)] == [chosen] * 4


def test_parities_are_not_chosen_where_a_device_cannot_make_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_C, "parity_hindrance", lambda devices: "no compiler")
    assert [one.chosen for one in choose([facts()] * 4)] == ["arc"] * 4


def test_what_one_rank_cannot_do_none_does(capsys: pytest.CaptureFixture[str]) -> None:
    ranks = [facts(), facts(), facts(ranks=()), facts()]
    assert {one.chosen for one in choose(ranks)} == {"peer"}
    (said,) = capsys.readouterr().err.splitlines()
    assert said == (
        "reft: REFT_SNAPSHOT_PROTECTION=auto: peer; not aec, arc, aor: no other rank has 1 tensor"
        " of this rank (first: o0.p0) (rank 2)"
    )


def test_that_nothing_is_possible_is_a_warning(capsys: pytest.CaptureFixture[str]) -> None:
    ranks = [facts(ranks=(), no_copies="REFT_MESH_ADDRESS is none")] * 2
    assert {one.chosen for one in choose(ranks)} == {"none"}
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith(
        "reft: warning: a lost node is NOT survived (REFT_SNAPSHOT_PROTECTION=auto): not aec"
    )
    assert said.endswith("; not peer: REFT_MESH_ADDRESS is none (rank 0)")


def test_on_one_node_nothing_is_stored(capsys: pytest.CaptureFixture[str]) -> None:
    made = choose([facts(is_sharded=True), facts()], 2)
    assert {(one.chosen, one.is_sharded) for one in made} == {("none", True)}
    assert "all ranks are on one node, so nothing is stored" in capsys.readouterr().err


def test_ranks_agree_where_one_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protection_choice, "_WAIT", timedelta(seconds=1))
    store = trusted()
    env = {"snapshot_overhead_percent": 0, "snapshot_every": 1}
    choices = [ProtectionChoice(env, job(rank, 3, 1), store) for rank in (0, 2)]
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda one: one.choose(facts((0, 1, 2)), "first"), choices))
    assert found == ["none", "none"]
    assert choices[0].is_open and not choices[1].is_open, "rank 0 asks for another choice"
    for one in choices:
        one.chosen = "arc"
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda one: one.choose(facts((0, 1, 2)), "7"), choices))
    assert found == ["arc", "arc"], "what was chosen before stays"


@pytest.mark.parametrize(
    "part",
    ["", "[]", "{}", '[{"aec": ""}, false]', "null", "[" * 100, json.dumps([{}, 7]), "x" * 99999],
)
def test_a_part_that_is_none_chooses_nothing(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protection_choice, "_WAIT", timedelta(seconds=1))
    monkeypatch.setattr("reft._link.trusted_store._PATIENCE_SEC", 0.1)
    store = trusted()
    store.put(ROUND, "protection/first/1", 1, part)
    env = {"snapshot_overhead_percent": 0, "snapshot_every": 1}
    assert ProtectionChoice(env, job(0, 2, 1), store).choose(facts((0, 1)), "first") == "none"


@pytest.mark.parametrize(
    "outcome", ["", "[]", "{}", '["all", {}, true]', '["arc", [], true]', '["arc", {"a": 7}, true]']
)
def test_an_outcome_that_is_none_is_ignored(outcome: str) -> None:
    assert protection_choice._outcome_of(outcome) is None


def test_what_costs_too_much_is_given_up_step_by_step() -> None:
    env = {"snapshot_overhead_percent": 2, "snapshot_every": 1}
    first, engine = choose([facts()] * 4, env=env)[0], FakeEngine()
    engine.rhythm = (64, 30_000, 1_500)
    assert first.chosen == "aec" and not first.gives_up(engine)  # type: ignore[arg-type]
    engine.exceeds = True
    assert first.gives_up(engine)  # type: ignore[arg-type]
    assert objections(facts(), FOUR_NODES)["aec"] == "", "nothing but the cost speaks against it"

    store = trusted()
    others = [ProtectionChoice(env, job(r, 4, 1), store) for r in (1, 2, 3)]
    first._store = store
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda one: one.choose(facts(), "9"), [first, *others]))
    assert found == ["peer"] * 4
    assert first.gives_up(engine)  # type: ignore[arg-type]
    assert set(first._too_dear) == set(CANDIDATES)


def test_another_rank_does_not_decide_what_is_too_dear() -> None:
    env = {"snapshot_overhead_percent": 2, "snapshot_every": 1}
    engine = FakeEngine()
    engine.exceeds = True
    assert not choose([facts()] * 4, env=env)[1].gives_up(engine)  # type: ignore[arg-type]
