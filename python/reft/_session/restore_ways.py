"""No restore fails twice in the same way: which way the next attempt takes.

While a rank restores, its vault records which step, in which way, and by how many attempts so far.
That outlives the rank. After an error, or after two attempts that ended without one (one
may have been killed from outside), the next attempt takes the next way: the older step, then the
state without the place in the loop, then none.

Threads: the training thread. Errors: none.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from reft import _C
from reft._link.trusted_store import ROUND, TrustedStore

_FAILED = 255  # tries, after an error
_MOST_TRIES = 2
_KEYS = ("restoring/ended", "restoring/tried")  # what one rank has seen fail counts for all


class Way(enum.IntEnum):
    NEWEST = 0
    OLDER = 1  # the step before the newest one
    STATE = 2  # the newest step, without the place in the loop
    NONE = 3


@dataclass(frozen=True)
class Begun:
    """A restore that has begun and not ended.

    Attributes:
        step: its step; 0: there is none.
        way: how it went.
        tries: attempts that have ended in it.
    """

    step: int = 0
    way: Way = Way.NEWEST
    tries: int = 0

    def next_way(self) -> Way:
        """How to restore after it."""
        if self.step and self.tries >= _MOST_TRIES:
            return Way(min(self.way + 1, Way.NONE))
        return self.way

    def failed(self) -> Begun:
        """The same after an error."""
        return Begun(self.step, self.way, _FAILED)

    def again(self, step: int, way: Way) -> Begun:
        """This restore, or another one, begins now."""
        is_same = (self.step, self.way) == (step, way)
        return Begun(step, way, self.tries + 1 if is_same else 1)

    def keep(self, engine: _C.Rank) -> None:
        """Leaves it in the vault, for the next attempt."""
        engine.set_restoring(self.step, self.way, self.tries)


def found_in(own_fd: int) -> Begun:
    """What the attempt before has left in this rank's vault."""
    if own_fd < 0:
        return Begun()
    try:
        step, way, tries = _C.list_vault(own_fd)["restoring"]
    except _C.Error:
        return Begun()
    if not 0 < step < 1 << 62 or way > Way.NONE or tries > _FAILED:
        return Begun()
    return Begun(step, Way(way), tries)


def report(store: TrustedStore, rank: int, begun: Begun) -> None:
    """Reports to the other ranks, before a round in which all take part."""
    if begun.step:
        key = _KEYS[begun.tries < _MOST_TRIES]
        store.put(ROUND, key, rank, f"{begun.step} {int(begun.way)} {begun.tries}")


def reported(store: TrustedStore) -> Begun:
    """What a rank has reported, the same on all ranks after that round."""
    for key in _KEYS:
        if (value := store.found(ROUND, key, 64)) is not None:
            try:
                step, way, tries = (int(word) for word in value.split())
                return Begun(step, Way(way), tries)
            except ValueError:
                continue
    return Begun()


def sentence(begun: Begun, way: Way, step: int | None) -> str:
    """What is done instead, for the terminal."""
    instead = {
        Way.OLDER: f"step {step}, the one before it, is resumed instead",
        Way.STATE: f"the state of step {step} is restored without the place in the loop",
    }.get(way, "training starts from its beginning")
    return f"an attempt ended while it restored step {begun.step}: {instead}"
