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

UNKNOWN = -1
_MOST = 64  # steps whose places are noted: as many, a restarted script may compute in vain


class Sites:
    """Where the first optimizer steps of a training end.

    Args:
        exact: whether the place in the loop is saved; else all steps are alike.

    Attributes:
        count: steps so far, of outermost optimizers, in this process.
        first: the step at which objects are noted; 0: none yet.
    """

    def __init__(self, exact: bool) -> None:
        self.count = 0
        self.first = 0
        self._exact = exact
        self._sites: list[str] = []  # of step i + 1
        self._known: tuple[list[tuple[str, int]], str] = ([], "")
        self._lines: list[str] = []  # of the first step

    def note(self, start: FrameType) -> None:
        """A step ends at `start`, the frame that called it, or one that this has called."""
        self.count += 1
        if self._exact and len(self._sites) < self.count <= _MOST:
            self._sites.append(self._site(start))

    def choose(self, start: FrameType) -> None:
        """Objects are noted at the step that `note` was called for."""
        self.first = self.count
        self._lines = _continuation.lines_of(start) if self._exact else []

    @property
    def is_early(self) -> bool:
        """Whether a restarted script computes as many steps before it is put back."""
        return self.count <= _MOST

    def is_at(self, start: FrameType, saved: dict[str, Any]) -> bool:
        """Whether a script that is yet to be put back can be put back at this step.

        Args:
            saved: what `saved` gave in the process before.
        """
        first, at = max(1, int(saved["first"])), int(saved["at"])
        if self.count < max(first, at):
            return False
        if not self._exact or not 0 < at <= len(saved["sites"]) or self.count >= at + _MOST:
            return True
        # A script that was edited does not wait for a place that it does not have any more.
        return self.count == at == first or self._site(start) == str(saved["sites"][at - 1])

    def saved(self, start: FrameType) -> dict[str, Any]:
        """What a restarted script is to know: the first step, at which one this one is put back
        (`UNKNOWN`: at none of the first ones), and where the first ones end."""
        at = self._reached(self._site(start)) if self._sites else self.first
        return {"first": self.first, "at": at, "sites": self._sites}

    def why_never(self, start: FrameType) -> str:
        """Why no step is known at which a restarted script is put back here."""
        here = _continuation.lines_of(start)
        where, there = next(
            ((a, b) for a, b in zip(here, self._lines, strict=False) if a != b and a and b),
            (here[-1], (self._lines or here)[-1]),
        )
        where = f"at {where}" if where != there else f"in another call at {where}"
        return (
            f"this step ends {where}, and none of the first {len(self._sites)} of a restarted"
            " script does: a resume at such a step restores tensors, optimizers and random state,"
            " but loops start again"
        )

    def put_back(self, saved: dict[str, Any]) -> None:
        """The first steps were those of the process before."""
        self._sites = list(saved["sites"])

    def _reached(self, site: str) -> int:
        """The first step that ends there, from the noted one on."""
        start = max(0, self.first - 1)
        return 1 + self._sites.index(site, start) if site in self._sites[start:] else UNKNOWN

    def _site(self, start: FrameType) -> str:
        calls = _continuation.calls_of(start)
        known, site = self._known
        if calls != known:
            site = hashlib.blake2b(repr(calls).encode(), digest_size=8).hexdigest()
            self._known = calls, site
        return site
