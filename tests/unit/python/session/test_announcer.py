"""What the terminal shows of a session, and when."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from reft._link.trusted_store import TrustedStore
from reft._session.announcer import Announcer
from reft._session.notes import Notes
from reft._state import discovery, registry
from tests.fakes.native import FakeAgentClient
from tests.support import jobs

Settings = Callable[..., dict[str, Any]]
STATS = {"payload_bytes": 2048, "vault_bytes": 3 << 20}
READER = ("main:reader", "csv.reader", "iterator of unknown kind")
LARGE = ("data.table", "list", "too large")
QUEUE = ("main:waiting", "queue.Queue", "not empty")
FILES = "; files that the script writes until then are those of its start"


class Terminal:
    """An announcer with what it writes and sends."""

    def __init__(
        self,
        env: dict[str, Any],
        capsys: pytest.CaptureFixture[str],
        rank: int,
        world: int,
        per_node: int,
        store: TrustedStore,
    ) -> None:
        self.client = FakeAgentClient("", "{}", 1)
        self._capsys = capsys
        job = replace(jobs.job(rank, world, per_node), id="demo")
        self.announcer = Announcer(env, job, Notes(self.client), store)

    def lines(self) -> list[str]:
        return [line.removeprefix("reft: ") for line in self._capsys.readouterr().err.splitlines()]


@pytest.fixture
def terminal(settings: Settings, capsys: pytest.CaptureFixture[str]) -> Callable[..., Terminal]:
    store = jobs.trusted()  # of one attempt

    def make(rank: int = 0, world: int = 2, per_node: int = 2, **values: str) -> Terminal:
        return Terminal(settings(**values), capsys, rank, world, per_node, store)

    return make


def state(**more: Any) -> discovery.State:
    regions = [
        discovery.Region("o0.p0", torch.zeros(256), (0, 1)),
        discovery.Region("o0.p1", torch.zeros(256)),
    ]
    return discovery.State(regions=regions, optimizers=[object()], **more)  # type: ignore[list-item]


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (
            {"REFT_SNAPSHOT_EVERY": "4"},
            "snapshot every 4 steps into host memory held by reft-agent",
        ),
        (
            {"REFT_SNAPSHOT_OVERHEAD_PERCENT": "3"},
            "snapshot every step (less often if the overhead exceeds 3 %) into host memory",
        ),
        (
            {"REFT_SNAPSHOT_PROTECTION": "arc"},
            "survives killed processes (REFT_SNAPSHOT_PROTECTION=arc)",
        ),
        ({"REFT_VAULT_DIR": "/data/vaults"}, "into files in /data/vaults; survives "),
    ],
)
def test_the_first_line_says_what_is_asked_for(
    terminal: Callable[..., Terminal], values: dict[str, str], said: str
) -> None:
    one = terminal(**values)
    one.announcer.started(None)
    first, second = one.lines()
    assert first.startswith("job demo: 2 ranks, ") and said in first
    assert second.startswith("protection summary follows the first step")


def test_a_vault_that_stays_where_an_earlier_start_has_put_it_is_said(
    terminal: Callable[..., Terminal],
) -> None:
    one = terminal(REFT_VAULT_DIR="/data/vaults")
    one.announcer.started(3, "host memory held by reft-agent")
    warning, first, _ = one.lines()
    assert warning.startswith(
        "warning: snapshots go on in host memory held by reft-agent, not in files in /data/vaults:"
    )
    assert "into host memory held by reft-agent; survives" in first


def test_a_restarted_job_says_where_it_resumes(terminal: Callable[..., Terminal]) -> None:
    one = terminal()
    one.announcer.started(12)
    one.announcer.started(12, after=3)
    assert one.lines()[1::2] == [
        f"resuming at step 12 when the first optimizer step returns{FILES}",
        f"resuming at step 12 when optimizer step 3 returns{FILES}",
    ]


def test_only_the_first_rank_speaks_for_all(terminal: Callable[..., Terminal]) -> None:
    one = terminal(rank=1)
    one.announcer.started(None)
    one.announcer.unprotected(1, [("r.s", "", "sparse")])
    one.announcer.protected(state(), STATS, 10, [READER], [])
    one.announcer.cadence(5, 8, 100, 10)
    assert one.lines() == []
    assert one.client.notes() == [["not protected:", "r.s", "", "sparse"]], "the agent knows"


def test_what_is_protected_is_said_once(terminal: Callable[..., Terminal]) -> None:
    one = terminal()
    registry.objects["x"] = object()
    found = state(schedulers=[1, 2])
    for _ in range(2):
        one.announcer.unprotected(1, [("r.s", "", "sparse"), ("r.t", "", "sparse")])
        one.announcer.protected(found, STATS, 1536, [READER], [LARGE])
    assert one.lines() == [
        "protected: 2.0 KiB of state in 2 tensors (1 shared with replicas), 1 optimizer,"
        " 2 schedulers, 1 registered object; each step this rank copies 2.0 KiB and pickles 1.5"
        " KiB; its vault takes 3.0 MiB of host memory",
        "NOT protected: r.s: sparse (and 1 more, which `reft doctor` lists)",
        "not restorable: main:reader (csv.reader): iterator of unknown kind",
        "taken for unchanged: data.table (list): too large",
    ]
    assert ["taken for unchanged:", *LARGE] in one.client.notes(), "the agent knows"


@pytest.mark.parametrize(
    ("protection", "world", "per_node", "said"),
    [
        ("arc", 2, 1, ["for a lost node: each shard of rank 0's state survives the loss of any node"]),
        ("arc:2", 3, 1, ["for a lost node: each shard of rank 0's state survives the loss of any 2 nodes"]),
        (
            "arc:2",
            4,
            2,
            [
                "for a lost node: each shard of rank 0's state survives the loss of any node",
                "warning: REFT_SNAPSHOT_PROTECTION=arc:2 asks for 3 nodes, but the replicas of some"
                " shard are on too few: the loss of 2 nodes is not survived",
            ],
        ),
        (
            "peer",
            2,
            1,
            [
                "for a lost node: each shard of rank 0's state survives the loss of any node, from the first"
                " committed step on"
            ],
        ),
        ("aec", 4, 1, ["for a lost node: each shard of rank 0's state survives the loss of any node"]),
        (
            "arc",
            2,
            2,
            [
                "warning: a lost node is NOT survived (REFT_SNAPSHOT_PROTECTION=arc): ranks 0 1"
                " are on one node, and a shard is lost with them"
            ],
        ),
    ],
)
def test_whether_a_lost_node_is_survived_is_said_once_it_is_known(
    terminal: Callable[..., Terminal], protection: str, world: int, per_node: int, said: list[str]
) -> None:
    one = terminal(REFT_SNAPSHOT_PROTECTION=protection, per_node=per_node, world=world)
    found = state()
    found.regions.pop()
    found.regions[0].ranks = tuple(range(world))
    one.announcer.protected(found, STATS, 1, [], [])
    assert one.lines()[1:] == said


def test_the_first_rank_whose_state_a_lost_node_takes_warns_for_all(
    terminal: Callable[..., Terminal],
) -> None:
    """Rank 0 has nothing that only it has."""
    shared, own = state(), state()
    shared.regions.pop()
    for rank, found in ((0, shared), (2, own), (1, own)):
        one = terminal(rank, 4, 1, REFT_SNAPSHOT_PROTECTION="arc")
        one.announcer.protected(found, STATS, 1, [], [])
        warnings = [line for line in one.lines() if "NOT survived" in line]
        assert len(warnings) == (rank == 2), warnings
        if warnings:
            assert "no other rank has 1 tensor of this rank (first: o0.p1) (rank 2)" in warnings[0]


def test_a_resumed_attempt_warns_of_a_lost_node_too(terminal: Callable[..., Terminal]) -> None:
    """Its ranks may have come to one node, or what they have may be another state by now."""
    one = terminal(REFT_SNAPSHOT_PROTECTION="peer", REFT_BANNER="0")
    one.announcer.resumed()
    found = state()
    one.announcer.protected(found, STATS, 1, [], [])
    assert one.lines() == [
        "warning: a lost node is NOT survived (REFT_SNAPSHOT_PROTECTION=peer): all ranks are on one"
        " node"
    ]
    one.announcer.protected(found, STATS, 1, [], [])
    assert one.lines() == []
    whole = terminal(1, 2, 1, REFT_SNAPSHOT_PROTECTION="arc")
    whole.announcer.resumed()
    shared = state()
    lonely = shared.regions.pop()
    whole.announcer.protected(shared, STATS, 1, [], [])
    assert whole.lines() == []
    shared.regions.append(lonely)
    whole.announcer.planned()
    whole.announcer.protected(shared, STATS, 1, [], [])
    assert "no other rank has 1 tensor of this rank (first: o0.p1) (rank 1)" in whole.lines()[0]


def test_after_a_resume_only_the_agent_learns_it_again(terminal: Callable[..., Terminal]) -> None:
    one = terminal()
    one.announcer.resumed()
    one.announcer.unprotected(8, [("r.s", "", "sparse")])
    one.announcer.protected(state(), STATS, 1, [], [])
    assert one.lines() == []
    assert one.client.notes() == [["not protected:", "r.s", "", "sparse"]]


def test_state_that_is_not_saved_is_said_when_it_turns_up(
    terminal: Callable[..., Terminal],
) -> None:
    one = terminal()
    one.announcer.protected(state(), STATS, 1, [], [])
    one.lines()
    for step in (4, 5):
        one.announcer.unprotected(step, [("scheduler 0 Own.lock", "lock", "cannot be pickled")])
    assert one.lines() == [
        "NOT protected from step 4 on: scheduler 0 Own.lock (lock): cannot be pickled"
    ]


def test_values_that_turn_up_later_are_said_with_their_step(
    terminal: Callable[..., Terminal],
) -> None:
    one = terminal()
    one.announcer.uncaptured(1, [READER])
    assert one.lines() == [], "the summary says it"
    one.announcer.protected(state(), STATS, 1, [READER], [])
    one.lines()
    one.announcer.uncaptured(4, [READER, QUEUE])
    one.announcer.uncaptured(5, [READER, QUEUE])
    one.announcer.uncaptured(6, [QUEUE])
    assert one.lines() == ["not restorable from step 4 on: main:waiting (queue.Queue): not empty"]
    assert [note[1] for note in one.client.notes()] == ["main:reader", "main:waiting"]


def test_a_flood_of_late_values_goes_to_the_agent_only(terminal: Callable[..., Terminal]) -> None:
    one = terminal()
    one.announcer.protected(state(), STATS, 1, [], [])
    one.lines()
    for step in range(20):
        one.announcer.uncaptured(step, [(f"main:v{step}", "x", "y")])
    assert len(one.lines()) == 5 and len(one.client.notes()) == 20


def test_the_overhead_is_said_once_it_is_measured_and_when_the_rhythm_changes(
    terminal: Callable[..., Terminal],
) -> None:
    one = terminal()
    for step, every, ppm, noise in [
        (1, 1, 0, -1),
        (2, 1, 20_000, 1_000),
        (3, 1, 30_000, 1_000),
        (4, 8, 9_000, 1_000),
        (5, 8, 9_000, 1_000),
        (6, 1, 9_000, 1_000),
    ]:
        one.announcer.cadence(step, every, ppm, noise)
    assert one.lines() == [
        "a snapshot every step costs 2.0 % ± 0.10 % of the mean step (measured)",
        "from step 4 on: a snapshot every 8 steps costs 0.90 % ± 0.10 % of the mean step (measured)",
        "from step 6 on: a snapshot every step costs 0.90 % ± 0.10 % of the mean step (measured)",
    ]


def test_without_a_banner_only_changes_are_said(terminal: Callable[..., Terminal]) -> None:
    one = terminal(REFT_BANNER="0")
    one.announcer.started(None)
    one.announcer.protected(state(), STATS, 1, [READER], [])
    one.announcer.cadence(2, 1, 20_000, 1_000)
    assert one.lines() == []
    one.announcer.cadence(4, 8, 9_000, 1_000)
    assert len(one.lines()) == 1


@pytest.mark.parametrize(
    ("graph", "why"),
    [
        (
            "main:fake",
            "main:fake is computed before a step of optimizer 0 (object) and differentiated after"
            " it",
        ),
        (
            None,
            "gradients of optimizer 1 (object) are computed before a step of optimizer 0 (object)"
            " and used after it",
        ),
    ],
)
def test_longer_iterations_are_explained(
    terminal: Callable[..., Terminal], graph: str | None, why: str
) -> None:
    one = terminal()
    first, second = object(), object()
    one.announcer.iteration_lengthened([first, second], first, second, graph)
    assert one.lines() == [
        "an iteration now ends when optimizer 1 (object) steps, not at each step of optimizer 0"
        f" (object): {why}"
    ]


def test_tensors_that_are_written_late_have_few_lines(terminal: Callable[..., Terminal]) -> None:
    shown = terminal()
    shown.announcer.written_late(["o0.p0"])
    shown.announcer.written_late(["o0.p0", "o0.p1", "m0.a", "m0.b", "m0.c", "m0.d", "m0.e"])
    shown.announcer.written_late(["m0.f"])
    late = [line for line in shown.lines() if "written between optimizer steps" in line]
    named = [line.partition(" w")[0].removeprefix("warning: ") for line in late]
    assert [line.partition(" was ")[0].removeprefix("warning: ") for line in late[:3]] == [
        "o0.p0",
        "o0.p1",
        "m0.a",
    ], named
    assert late[3].startswith("warning: 4 more tensors (m0.b, m0.c, m0.d, …) were written"), late
    assert len(late) == 4
