"""Which protection a job gets with REFT_SNAPSHOT_PROTECTION=auto.

The ranks choose when they plan together. Each rank writes its objections to every candidate: some
of its own state would not survive a lost node, or the node has no memory for the candidate. The
first candidate without an objection is taken; if each has one, ranks store nothing for a lost node,
and rank 0 reports why. What ranks store themselves comes before what goes
through the network.

While snapshots cost more than REFT_SNAPSHOT_OVERHEAD_PERCENT even at the longest interval, rank 0
asks for another choice, without what the ranks themselves store, and then without copies.

Threads: the training thread. Errors: none; where a rank is missing, the choice before stays.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from reft import _C, _voice
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
_MOST_TRIES = 3  # to choose where a rank was missing
_SETTING = "REFT_SNAPSHOT_PROTECTION=auto"
_ONE_NODE = "all ranks are on one node"
_SHARDED = "a ZeroRedundancyOptimizer keeps each part of its state on one rank only"

Objections = dict[str, str]
"""What speaks against each candidate, "" if nothing does."""
Against = dict[str, tuple[int, str]]
"""By candidate: the first rank that has something against it, and what."""


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
    if len(set(layout.domain_of)) == 1:
        return _ONE_NODE
    if candidate == PEER and facts.no_copies:
        return facts.no_copies
    if facts.is_sharded and candidate in _STORED:
        if candidate != AOR:
            return _SHARDED
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
        is_sharded: whether some rank had a ZeroRedundancyOptimizer at the newest choice.
        is_open: whether this rank is to ask for another choice: some rank was missing.
    """

    def __init__(self, env: dict[str, Any], job: Job, store: TrustedStore) -> None:
        self._env, self._job, self._store = env, job, store
        self.chosen = NONE
        self.is_sharded = self.is_open = False
        self._tries = 0
        self._too_dear: dict[str, str] = {}
        self._reported = ""

    def choose(self, facts: Facts, plan: str) -> str:
        """Chooses with all other ranks, which call this with the same plan.

        Args:
            plan: names this plan, equal on all ranks and used once.

        Returns:
            `chosen`.
        """
        mine = objections(facts, self._job.layout) | self._too_dear
        key, rank = f"protection/{plan}", self._job.rank
        self._store.put(ROUND, f"{key}/{rank}", rank, json.dumps([mine, facts.is_sharded]))
        missing = json.dumps([self.chosen, {}, self.is_sharded])
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
        found = _outcome_of(outcome)
        against: Against = {}
        if found is not None:
            self.chosen, against, self.is_sharded = found
        self._tries = self._tries + 1 if outcome == missing else 0
        self.is_open = rank == 0 and 0 < self._tries < _MOST_TRIES
        self._report(against)
        return self.chosen

    def gives_up(self, engine: _C.Rank) -> bool:
        """Gives up candidates if snapshots cost too much. Returns whether it has given up any: the
        ranks have to choose again."""
        if self._job.rank != 0 or self.chosen == NONE or not engine.exceeds_at_longest:
            return False
        limit, (_, overhead_ppm, _) = self._env["snapshot_overhead_percent"], engine.cadence
        why = f"snapshots cost {overhead_ppm / 10_000:.1f} % of a step, and the limit is {limit} %"
        dear = _STORED if self.chosen in _STORED else CANDIDATES
        self._too_dear |= {one: why for one in dear if one not in self._too_dear}
        return True

    def _report(self, against: Against) -> None:
        if self._job.rank != 0:
            return
        by_reason: dict[str, list[str]] = {}
        for one, (rank, why) in against.items():
            by_reason.setdefault(f"{why} (rank {rank})", []).append(one)
        reasons = [f"not {', '.join(names)}: {why}" for why, names in by_reason.items()]
        report = _voice.say
        if _ONE_NODE in {why for _, why in against.values()}:
            line = f"{_SETTING}: {_ONE_NODE}, so nothing is stored for a lost node"
        elif self.chosen != NONE:
            line = f"{_SETTING}: {'; '.join([self.chosen, *reasons])}"
        else:
            why = "; ".join(reasons) or "not every rank has written what it needs"
            report, line = _voice.warn, f"a lost node is NOT survived ({_SETTING}): {why}"
        if self._reported != line:
            self._reported = line
            report(line)


def _chosen_of(parts: list[str]) -> str:
    """The outcome: what is chosen, and against each candidate before it the first rank that has
    something, and what."""
    found = [_part_of(part) for part in parts]
    is_sharded = any(sharded for _, sharded in found)
    against: Against = {}
    for candidate in CANDIDATES:
        first = next((rank for rank, (one, _) in enumerate(found) if one[candidate]), None)
        if first is None:
            return json.dumps([candidate, against, is_sharded])
        against[candidate] = first, found[first][0][candidate]
    return json.dumps([NONE, against, is_sharded])


def _part_of(text: str) -> tuple[Objections, bool]:
    part = bounded_json.loads(text.encode(), limit=_LONGEST_PART)
    match part:
        case [dict(found), bool(is_sharded)] if found.keys() >= set(CANDIDATES):
            return {candidate: str(found[candidate]) for candidate in CANDIDATES}, is_sharded
    raise ValueError("no objections of a rank")


def _outcome_of(text: str) -> tuple[str, Against, bool] | None:
    """What is chosen, what speaks against others, and `is_sharded`; None if this is no outcome."""
    try:
        match bounded_json.loads(text.encode(), limit=_LONGEST_PART):
            case [chosen, dict(found), bool(is_sharded)] if chosen in (*CANDIDATES, NONE):
                against = {str(one): (int(rank), str(why)) for one, (rank, why) in found.items()}
                return chosen, against, is_sharded
    except (ValueError, TypeError):
        pass
    return None
