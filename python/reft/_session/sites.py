"""At which optimizer step a restarted script is put back.

Both processes, the one that dies and the one that takes its place, note where objects stand at the
same step, the *first* one: names mean the same in both then. A script can be put back only where it
stands at the same place, so a loop that steps optimizers at several places is put back at the first
step, from the first one on, that ends at the place of the snapshot.

Threads: the training thread. Errors: none.
"""

from __future__ import annotations

import hashlib
from types import FrameType
from typing import Any

from reft import _continuation

_MOST = 64  # steps whose places are noted: as many, a restarted script may compute in vain


class Sites:
    """Where the first optimizer steps of a training end.

    Args:
        exact: whether the place in the loop is saved; else all steps are alike.

    Attributes:
        count: optimizer steps of this training so far, those before a restart included.
        first: the step at which objects are noted; 0: none yet.
    """

    def __init__(self, exact: bool) -> None:
        self.count = 0
        self.first = 0
        self._exact = exact
        self._reached: dict[str, int] = {}  # by place, the first step that ends there
        self._variables: set[str] = set()  # that have a value at one of the others
        self._known: tuple[list[tuple[str, int]], str] = ([], "")
        self._lines: list[str] = []  # of the first step
        self._is_other = False  # than the one that is yet to be put back

    def note(self, start: FrameType) -> None:
        """A step ends at `start`, the frame that called it, or one that this has called."""
        self.count += 1
        if self._exact and self.first and self.is_early:
            site = self._site(start)
            if site not in self._reached:
                self._reached[site] = self.count
                self._variables |= _continuation.note_variables(start)

    def choose(self, start: FrameType) -> None:
        """Objects are noted at the step that `note` was called for."""
        self.first, self._reached, self._variables = self.count, {}, set()
        if self._exact:
            self._reached[self._site(start)] = self.count
            self._lines = _continuation.lines_of(start)

    @property
    def is_early(self) -> bool:
        """Whether a restarted script may compute as many steps before it is put back."""
        return self.count < self.first + _MOST

    def saved(self, start: FrameType) -> dict[str, Any]:
        """What a restarted script is to know: the first step, at which one it is put back here (0:
        at none that is known), and where the first ones end."""
        site = self._site(start) if self._reached else ""
        at = self._reached.get(site, 0)
        return {
            "count": self.count,
            "first": self.first,
            "at": at,
            "site": site,
            "reached": dict(self._reached),
            "variables": sorted(self._variables),
        }

    def is_at(self, start: FrameType, saved: dict[str, Any], waits: bool) -> bool:
        """Whether a script that is yet to be put back is put back at this step.

        Args:
            saved: what `saved` gave in the process before.
            waits: whether its place matters.
        """
        first = max(1, int(saved["first"]))
        if self.count < first:
            return False
        if not self._exact or not waits or not saved["at"] or not self.is_early:
            return True
        site = self._site(start)
        if self.count == first:
            # A script that was edited does not wait for a place that it does not have any more.
            self._is_other = saved["reached"].get(site) != first
        return self._is_other or site == str(saved["site"])

    def why_never(self, start: FrameType) -> str:
        """Why a restarted script is not put back at the place of this step; "" if it is."""
        if not self._reached or self._site(start) in self._reached:
            return ""
        pairs = list(zip(_continuation.lines_of(start), self._lines, strict=False))
        own = [(a, b) for a, b in pairs if a and b]
        where, there = next(((a, b) for a, b in own if a != b), own[-1] if own else ("?", ""))
        where = f"at {where}" if where != there else f"in another call at {where}"
        return (
            f"this step ends {where}, and none of the first {_MOST} of a restarted script does: a"
            " resume at such a step restores tensors, optimizers and random state, but loops start"
            " again"
        )

    def put_back(self, saved: dict[str, Any]) -> None:
        """The steps of this training were those of the process before."""
        self.count, self.first = saved["count"], saved["first"]
        self._reached, self._variables = dict(saved["reached"]), set(saved["variables"])
        _continuation.know_variables(self._variables)

    def _site(self, start: FrameType) -> str:
        calls = _continuation.calls_of(start)
        known, site = self._known
        if calls != known:
            site = hashlib.blake2b(repr(calls).encode(), digest_size=8).hexdigest()
            self._known = calls, site
        return site
