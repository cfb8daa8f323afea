"""What has to hold of a job that goes on with fewer nodes: one is lost, and none takes its place.

Other ranks compute other sums, so after the resume there is no truth to compare losses with. These
are compared, by the lines that `node_worker.py --deal` logs:

    before the loss   every line is that of the truth, a run of as many ranks without reft
    at the resume     the first line of a rank is the one of the resumed step: parameters and
                      optimizer state are those of the truth at that step, and what the rank has for
                      itself is that of the rank whose place it takes. No rank knew of a newer
                      committed step
    after it          no step is left out up to the last one, replicas are equal after each step,
                      and the items of an epoch come once each

A job that begins anew has a truth, a run that had as few ranks all along, and equals it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path


@dataclass(frozen=True)
class Row:
    """What a rank logs of a step."""

    step: int
    loss: str
    epoch: int
    committed: int  # newest step that the rank knows to be committed; -1: none
    state: str  # hash of what replicas have alike
    own: str  # hash of what only this rank has: random state, a sum of losses
    items: tuple[int, ...]

    @property
    def computed(self) -> Row:
        """Without what is a matter of time."""
        return replace(self, committed=-1)


Rows = dict[int, Row]  # of one rank, by step


def read_rows(path: Path) -> Rows:
    """Of each whole line; none if there is no such file."""
    try:
        lines = path.read_text().split("\n")[:-1]
    except OSError:
        return {}
    rows = {}
    for line in lines:
        step, loss, epoch, committed, state, own, *items = line.split()
        rows[int(step)] = Row(
            int(step), loss, int(epoch), int(committed), state, own, tuple(map(int, items))
        )
    return rows


@dataclass
class Expected:
    """The truth, and who takes whose place.

    Attributes:
        truth: rows of each rank of a run that lost nothing.
        fewer: as `truth`, of a run that had as few ranks all along; for a job that begins anew.
        sources: for each rank of now, the ranks of then whose own state it may have.
        steps: of the whole training.
        items: of an epoch.
        newest: whether the newest committed step has to come back, not an older one.
        anew: whether a job whose first line is of step 1 has begun anew, not resumed that step.
    """

    truth: Sequence[Rows]
    fewer: Sequence[Rows]
    sources: Sequence[Collection[int]]
    steps: int
    items: int
    newest: bool = True
    anew: bool = True

    def differences(self, starts: Sequence[Sequence[Rows]]) -> list[str]:
        """What is not as it has to be.

        Args:
            starts: rows by start and rank; those after the first one are of fewer ranks.
        """
        before, found = starts[0], []
        for rank, rows in enumerate(before):
            found += _unlike(f"before the loss, rank {rank}", rows, self.truth[rank])
        now = range(len(self.sources))
        after: list[Rows] = [{} for _ in now]
        for rank in now:
            for start in starts[1:]:  # one that goes on from another of as many ranks is exact
                again = {step: row for step, row in start[rank].items() if step in after[rank]}
                found += _unlike(f"computed again, rank {rank}", again, after[rank])
                after[rank] |= start[rank]
        if not all(after):
            return [*found, f"ranks {[r for r in now if not after[r]]} logged nothing any more"]
        first = {min(rows) for rows in after}
        if len(first) > 1:
            return [*found, f"ranks began at different steps: {sorted(first)}"]
        resumed = first.pop()
        for rank in now:
            if missing := set(range(resumed, self.steps + 1)) - after[rank].keys():
                found.append(f"rank {rank} left out steps {sorted(missing)}")
        if resumed == 1 and self.anew:
            for rank in now:
                found += _unlike(f"begun anew, rank {rank}", after[rank], self.fewer[rank])
            return found
        found += self._at_resume(resumed, before, after)
        found += _replicas_that_differ(after)
        return found + self._items_not_dealt_once(resumed, after)

    def _at_resume(
        self, resumed: int, before: Sequence[Rows], after: Sequence[Rows]
    ) -> list[str]:
        found = []
        newest = max((row.committed for rows in before for row in rows.values()), default=-1)
        if self.newest and resumed < newest:
            found.append(f"resumed at step {resumed}, and step {newest} was committed")
        for rank, rows in enumerate(after):
            row = rows[resumed]
            if row.state != self.truth[0][resumed].state:
                found.append(f"parameters or optimizer state of rank {rank} at step {resumed}")
            takes = [self.truth[source][resumed] for source in self.sources[rank]]
            if (row.loss, row.own) not in [(taken.loss, taken.own) for taken in takes]:
                found.append(f"random state or sums of rank {rank} at step {resumed}")
        return found

    def _items_not_dealt_once(self, resumed: int, after: Sequence[Rows]) -> list[str]:
        """Epochs that came to their end: an item may come twice only to give all ranks equally
        many."""
        old = [row for rows in self.truth for row in rows.values() if row.step <= resumed]
        new = [row for rows in after for row in rows.values() if row.step > resumed]
        found = []
        for epoch in range(max((row.epoch for row in new), default=0)):
            counts = Counter(i for row in old + new if row.epoch == epoch for i in row.items)
            left = self.items - sum(len(row.items) for row in old if row.epoch == epoch)
            if lacking := set(range(self.items)) - set(counts):
                found.append(f"items {sorted(lacking)} of epoch {epoch} never came")
            if (more := sum(counts.values()) - self.items) != -left % len(after):
                found.append(f"{more} items of epoch {epoch} came more than once")
        return found


def _unlike(what: str, rows: Rows, truth: Rows) -> list[str]:
    return [
        f"{what}: step {step}"
        for step, row in rows.items()
        if step not in truth or row.computed != truth[step].computed
    ]


def _replicas_that_differ(after: Sequence[Rows]) -> list[str]:
    states: dict[int, set[str]] = {}
    for rows in after:
        for step, row in rows.items():
            states.setdefault(step, set()).add(row.state)
    return [f"replicas differ after step {step}" for step, of in states.items() if len(of) > 1]
