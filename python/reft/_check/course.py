"""One check from the nodes' reports to the verdict: which rounds of measurements follow, given what
the ones before have shown. `plan` says why so many.

Threads: one. Errors: `ValueError` if a round is not that which was asked for.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from reft._check import judge, plan
from reft._check.evidence import Pair, Report, Verdict
from reft._check.plan import Edge

FIRST, AGAIN, SHARED = "first", "again", "shared"


@dataclass(frozen=True)
class Round:
    """Measurements at one time.

    Attributes:
        phase: first; again: longer ones; shared: all pairs have one node in common.
        pairs: nodes.
    """

    phase: str
    pairs: tuple[Edge, ...]


class Course:
    """Args:
    nodes: of the job.
    reports: of those that have published one.
    partners: as in `plan.tournament`; None: all, up to `plan.FULL_NODES`.
    """

    def __init__(
        self, nodes: int, reports: Mapping[int, Report], partners: int | None = None
    ) -> None:
        self._nodes, self._reports = nodes, reports
        self._rails = max((len(report.ports) for report in reports.values()), default=0)
        if partners is None and len(reports) > plan.FULL_NODES:
            partners = plan.FAULTS + 1
        self._pairs: list[Pair] = []
        self._silent: set[int] = set()
        first = plan.tournament(sorted(reports), partners) if self._rails else []
        self._left = [Round(FIRST, tuple(pairs)) for pairs in first]
        self._confirmations = 0
        self.rounds = {FIRST: 0, AGAIN: 0, SHARED: 0}

    def next(self) -> Round | None:
        """The next round; None if nothing is left to measure."""
        if not self._left:
            self._plan_more()
        if not self._left:
            return None
        one = self._left.pop(0)
        pairs = tuple(at for at in one.pairs if not self._silent & set(at))
        self.rounds[one.phase] += 1
        return Round(one.phase, pairs)

    def record(self, pairs: Iterable[Pair], silent: Iterable[int] = ()) -> None:
        """Takes what a round has measured, and which nodes did not answer in it."""
        self._silent.update(silent)
        self._pairs.extend(pairs)

    def verdict(self) -> Verdict:
        return judge.judge(self._nodes, self._reports, self._pairs, self._silent)

    def _plan_more(self) -> None:
        if self._confirmations < plan.CONFIRMATIONS:
            self._confirmations += 1
            self._left = [Round(AGAIN, tuple(pairs)) for pairs in self._suspicious()]
            if self._left:
                return
            self._confirmations = plan.CONFIRMATIONS
        if self.rounds[SHARED] < plan.SHARED_ROUNDS:
            node = judge.open_question(self.verdict())
            if node is not None:
                others = {n for p in self._pairs if node in (p.a, p.b) for n in (p.a, p.b)}
                pairs = sorted(plan.edge(node, other) for other in others - {node} - self._silent)
                if len(pairs) == 2:
                    self._left = [Round(SHARED, tuple(pairs))]

    def _suspicious(self) -> list[list[Edge]]:
        """Rounds that measure again what decides, in any rail."""
        odd = judge.odd_links(self._nodes, self._reports, self._pairs, self._silent)
        wanted: dict[Edge, None] = {}
        for rail in range(self._rails):
            pairs = [p for p in self._pairs if p.rail == rail and not self._silent & {p.a, p.b}]
            grades = judge.grade(pairs, self._reports)
            bad = [at for at, one in grades.items() if one.level]
            for pairs_of_round in plan.confirmation(grades, bad):
                wanted.update(dict.fromkeys(pairs_of_round))
        wanted.update(dict.fromkeys(sorted(odd - set(wanted))))
        return plan.greedy(list(wanted))
