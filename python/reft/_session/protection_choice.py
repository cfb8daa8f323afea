"""Which protection a job gets with REFT_SNAPSHOT_PROTECTION=auto.

The ranks choose when they plan together. Each one says of every candidate what speaks against it:
that some of its own state would not survive a lost node, or that there is no memory for it. The
first candidate against which no rank has anything is taken; if there is no such one, ranks store
nothing for a lost node, and rank 0 says why. What ranks store themselves comes before what goes
through the network.

While snapshots cost more than REFT_SNAPSHOT_OVERHEAD_PERCENT even at the longest interval, rank 0
asks for another choice, without what the ranks themselves store, and then without copies.

Threads: the training thread. Errors: none; where a rank is missing, nothing is stored.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from reft import _voice
from reft._link import bounded_json
from reft._link.common_outcome import common_outcome
from reft._link.job_identity import Job, Layout
from reft._link.protection import AOR, NONE, PEER
from reft._link.trusted_store import ROUND, TrustedStore
from reft._state import node_loss
from reft._state.discovery import State

_WAIT = timedelta(seconds=12)
_LONGEST_PART, _LONGEST_REASON = 16384, 300
_STORED = ("aec", "arc", AOR)  # by ranks
CANDIDATES = (*_STORED, PEER)
_LEAST_SAVED = 0.1  # of arc's bytes, by which aec is worth its computation
_RAREST = 64  # times the interval of the settings (snapshot/cost/cadence.h)

Objections = dict[str, str]
"""What speaks against each candidate, "" if nothing does."""


@dataclass(frozen=True)
class Facts:
    """What one rank knows about its state.

    Attributes:
        state: with the ranks that share each region.
        is_sharded: whether a ZeroRedundancyOptimizer keeps some of it.
        not_recomputed: why that is not computed on another rank; "": it is.
        no_copies: why the agent of another node cannot keep copies; "" if it can, or if this rank
            does not know.
        bytes_of: of one snapshot of this rank, by protection.
        no_room: why there is no memory for a protection on this node; "" if there is.
    """

    state: State
    is_sharded: bool
    not_recomputed: str
    no_copies: str
    bytes_of: Callable[[str], float]
    no_room: Callable[[str], str]


def objections(facts: Facts, layout: Layout) -> Objections:
    """What one rank has against each candidate."""
    return {one: _objection(one, facts, layout)[:_LONGEST_REASON] for one in CANDIDATES}


def _objection(candidate: str, facts: Facts, layout: Layout) -> str:
    if candidate == PEER and facts.no_copies:
        return facts.no_copies
    if facts.is_sharded and candidate in _STORED:
        if candidate != AOR:
            return "a ZeroRedundancyOptimizer keeps each part of its state on one rank only"
        if facts.not_recomputed:
            return facts.not_recomputed
    why = node_loss.survival(facts.state, layout, candidate).why
    if why:
        return why
    if candidate == "aec":
        most = (1 - _LEAST_SAVED) * facts.bytes_of("arc")
        if facts.bytes_of("aec") > most:
            return "with replicas on two nodes, parities take as much memory as copies"
    return facts.no_room(candidate)


class ProtectionChoice:
    """The choices of one session.

    Attributes:
        chosen: what is stored now, as REFT_SNAPSHOT_PROTECTION.
    """

    def __init__(self, env: dict[str, Any], job: Job, store: TrustedStore) -> None:
        self._env, self._job, self._store = env, job, store
        self.chosen = NONE
        self._too_dear: dict[str, str] = {}
        self._said = ""

    @property
    def is_possible(self) -> bool:
        """Whether the job has several nodes."""
        return len(set(self._job.layout.domain_of)) > 1

    def choose(self, facts: Facts, plan: str) -> str:
        """Chooses with all other ranks, which call this with the same plan.

        Args:
            plan: names this plan, equal on all ranks and used once.

        Returns:
            `chosen`.
        """
        if not self.is_possible:
            self._say("all ranks are on one node, so nothing is stored for a lost node")
            return self.chosen
        mine = objections(facts, self._job.layout) | self._too_dear
        key, rank = f"protection/{plan}", self._job.rank
        self._store.put(ROUND, f"{key}/{rank}", rank, json.dumps(mine))
        missing = json.dumps([NONE, {}])
        outcome = common_outcome(
            self._store,
            ROUND,
            key,
            rank,
            range(self._job.world),
            _chosen_of,
            missing,
            _WAIT,
            _LONGEST_PART,
        )
        self.chosen, against = _outcome_of(outcome)
        self._report(against)
        return self.chosen

    def is_too_dear(self, cadence: tuple[int, int, int]) -> bool:
        """Whether another choice shall be made, because of what snapshots cost.

        Args:
            cadence: of the engine: the interval, the overhead and its noise in millionths of a
                step; the noise is negative if they are not known.
        """
        every, overhead_ppm, noise_ppm = cadence
        limit = int(self._env["snapshot_overhead_percent"])
        if self._job.rank != 0 or self.chosen == NONE or not limit or noise_ppm < 0:
            return False
        if every < _RAREST * int(self._env["snapshot_every"]):
            return False
        if overhead_ppm - noise_ppm <= limit * 10_000:
            return False
        why = f"snapshots cost {overhead_ppm / 10_000:.1f} % of a step, and the limit is {limit} %"
        dear = _STORED if self.chosen in _STORED else CANDIDATES
        self._too_dear |= {one: why for one in dear if one not in self._too_dear}
        return True

    def _report(self, against: dict[str, tuple[int, str]]) -> None:
        if self._job.rank != 0:
            return
        reasons: dict[str, list[str]] = {}
        for one, (rank, why) in against.items():
            reasons.setdefault(f"{why} (rank {rank})", []).append(one)
        told = "; ".join(f"not {', '.join(names)}: {why}" for why, names in reasons.items())
        if self.chosen != NONE:
            self._say(f"{self.chosen}" + (f"; {told}" if told else ""))
            return
        told = told or "not every rank has said what it needs"
        _voice.warn_once(
            f"auto {told}",
            f"a lost node is NOT survived (REFT_SNAPSHOT_PROTECTION=auto): {told}",
        )

    def _say(self, what: str) -> None:
        if self._job.rank == 0 and self._said != what:
            self._said = what
            _voice.say(f"REFT_SNAPSHOT_PROTECTION=auto: {what}")


def _chosen_of(parts: list[str]) -> str:
    """The outcome: what is chosen, and against each candidate before it the first rank that has
    something, and what."""
    found = [_part_of(part) for part in parts]
    against: dict[str, tuple[int, str]] = {}
    for candidate in CANDIDATES:
        first = next((rank for rank, one in enumerate(found) if one[candidate]), None)
        if first is None:
            return json.dumps([candidate, against])
        against[candidate] = first, found[first][candidate]
    return json.dumps([NONE, against])


def _part_of(text: str) -> Objections:
    part = bounded_json.loads(text.encode(), limit=_LONGEST_PART)
    if not isinstance(part, dict) or not part.keys() >= set(CANDIDATES):
        raise ValueError("no objections of a rank")
    return {candidate: str(part[candidate]) for candidate in CANDIDATES}


def _outcome_of(text: str) -> tuple[str, dict[str, tuple[int, str]]]:
    try:
        chosen, against = bounded_json.loads(text.encode(), limit=_LONGEST_PART)
        if chosen not in (*CANDIDATES, NONE) or not isinstance(against, dict):
            raise ValueError(chosen)
        return chosen, {str(one): (int(rank), str(why)) for one, (rank, why) in against.items()}
    except (ValueError, TypeError):
        return NONE, {}
