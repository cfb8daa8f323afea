"""What reft tells the user on the terminal: two lines at start, one at resume, one per kind of trouble."""

from __future__ import annotations

import sys

_said: set[str] = set()


def say(text: str) -> None:
    """One line on stderr, marked as ours; never fails."""
    try:
        print(f"reft: {text}", file=sys.stderr, flush=True)
    except (OSError, ValueError):
        pass


def warn_once(kind: str, text: str) -> None:
    """Says each kind of trouble once per process."""
    if kind not in _said:
        _said.add(kind)
        say(f"warning: {text}")


def size(count: float) -> str:
    """1536 → '1.5 KiB'."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return ""
