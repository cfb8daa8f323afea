"""What a rank reports about its state: what is not protected, not restorable, or was not restored,
and what a verified resume has found.

The terminal gets the first of a kind and how many there are; the agent gets all of them, for `reft
doctor`.

Threads: the training thread. Errors: none; an agent that is not connected gets them with the next
note.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from reft._link import agent_protocol

NOT_PROTECTED = "not protected:"
NOT_RESTORABLE = "not restorable:"
NOT_RESTORED = "not restored:"
NOT_VERIFIED = "not verified:"
IGNORED = "ignored:"
RESUME = agent_protocol.RESUME_NOTE
ASSUMED = agent_protocol.ASSUMED_NOTE

Note = tuple[str, str, str]  # where, kind, why

_MOST = 256  # kMaxNotes of agent/peers/messages.h
_LONGEST = 512


class Notes:
    """The notes of one rank; each is kept once."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self._all: dict[tuple[str, str, str, str], None] = {}

    def add(self, about: str, found: Iterable[Note]) -> list[Note]:
        """Keeps what is new of `found`, sends it to the agent, and returns it."""
        fresh = [note for note in dict.fromkeys(found) if (about, *note) not in self._all]
        new = fresh[: _MOST - len(self._all)]
        if new:
            self._all |= {(about, *note): None for note in new}
            entries = [list(map(_shortened, note)) for note in self._all]
            self._client.send(agent_protocol.NOTES, json.dumps({"notes": entries}))
        return new


def _shortened(text: str) -> str:
    return text.encode()[:_LONGEST].decode(errors="ignore")


def line(found: list[Note]) -> str:
    """The first of several, for the terminal."""
    where, kind, why = found[0]
    more = f" (and {len(found) - 1} more, which `reft doctor` lists)" if len(found) > 1 else ""
    return f"{where} ({kind}): {why}{more}" if kind else f"{where}: {why}{more}"
