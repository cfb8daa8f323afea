"""At which optimizer step a restarted script is put back.

Both processes, the one that dies and the one that takes its place, note where objects stand at the
same step, the *first* one: names mean the same in both then. A script can be put back only where it
stands at the same place, so a loop that steps optimizers in several places is put back at the first
step, from the first one on, that ends at the place of the snapshot.

Threads: the training thread. Errors: none.
"""

from __future__ import annotations

import hashlib
from types import FrameType
from typing import Any

from .bytecode import Unsupported, analyse
from .frames import Path, frames_from

_MOST = 64  # steps whose places are noted: so many, a restarted script may compute in vain
_Calls = list[tuple[str, int]]


class Sites:
    """Where the first optimizer steps of a training end.

    Attributes:
        count: steps so far, of outermost optimizers, in this process.
        first: the step at which objects are noted; 0: none yet.
    """

    def __init__(self) -> None:
        self.count = 0
        self.first = 0
        self._sites: list[str] = []  # of step i + 1
        self._known: tuple[_Calls, str] = ([], "")
        self._lines: list[str] = []  # of the first step, from the innermost frame out

    def note(self, start: FrameType) -> None:
        """A step ends in the frame that `start` was called by, or is."""
        self.count += 1
        if self.count <= _MOST and self.count > len(self._sites):
            self._sites.append(self._site(frames_from(start)))

    def choose(self, start: FrameType) -> None:
        """Objects are noted at the step that `note` was called for."""
        self.first, self._lines = self.count, _lines(frames_from(start))

    def resumes_at(self, start: FrameType) -> int:
        """The step at which a restarted script is put back, if this one is what was saved."""
        return self._reached(self._site(frames_from(start))) or self.first

    def why_never(self, start: FrameType) -> str:
        """Why a restarted script cannot be put back at this step; "" if it can."""
        path = frames_from(start)
        if not self._sites or not self._lines or self._reached(self._site(path)):
            return ""
        here = _lines(path)
        where, there = next(
            ((a, b) for a, b in zip(here, self._lines, strict=False) if a != b and a and b),
            (here[-1], self._lines[-1]),
        )
        where = f"at {where}" if where != there else f"in another call at {where}"
        return (
            f"this step ends {where}, and none of the first {len(self._sites)} of a restarted"
            " script does: a resume at such a step restores tensors, optimizers and random state,"
            " but loops start again"
        )

    def is_at(self, start: FrameType, saved: dict[str, Any]) -> bool:
        """Whether a script that is yet to be put back can be put back at this step.

        Args:
            saved: what `saved` gave in the process before.
        """
        at = int(saved["at"])
        if self.count < at:
            return False
        if at == saved["first"] or at > len(saved["sites"]) or self.count >= at + _MOST:
            return True
        return bool(self._site(frames_from(start)) == saved["sites"][at - 1])

    @property
    def is_early(self) -> bool:
        """Whether a restarted script computes as many steps before it is put back."""
        return self.count <= _MOST

    def saved(self, start: FrameType) -> dict[str, Any]:
        """What a restarted script is to know."""
        return {"first": self.first, "at": self.resumes_at(start), "sites": self._sites}

    def put_back(self, saved: dict[str, Any]) -> None:
        """The steps of this process stand for the first ones of the process before."""
        self._sites = list(saved["sites"])

    def _reached(self, site: str) -> int:
        """The first step that ends there, from the noted one on; 0 if none does."""
        start = max(0, self.first - 1)
        return 1 + self._sites.index(site, start) if site in self._sites[start:] else 0

    def _site(self, path: Path) -> str:
        calls: _Calls = [
            (frame.f_code.co_qualname, _offset(frame) if user else -1) for frame, user, _ in path
        ]
        known, site = self._known
        if calls != known:
            site = hashlib.blake2b(repr(calls).encode(), digest_size=8).hexdigest()
            self._known = calls, site
        return site


def _offset(frame: FrameType) -> int:
    try:
        return analyse(frame.f_code).point(frame.f_lasti).offset
    except Unsupported:
        return frame.f_lasti


def _lines(path: Path) -> list[str]:
    """Of each frame; "" where it is not the script's own."""
    return [
        f"{analyse(frame.f_code).file}:{frame.f_lineno}" if user else "" for frame, user, _ in path
    ]
