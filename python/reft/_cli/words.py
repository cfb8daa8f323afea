"""How numbers, and text that others wrote, are printed."""

from __future__ import annotations

from typing import Any

from rich.console import Console

from reft import _voice
from reft._voice import percent, size

__all__ = ["console", "nanoseconds", "overhead", "percent", "printable", "signed", "size", "step"]


def console() -> Console:
    """Text goes to stdout as it is: no emoji, no highlighting."""
    return Console(highlight=False, emoji=False, soft_wrap=False)


def printable(text: str) -> str:
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def nanoseconds(count: float) -> str:
    """31000000 → '31.0 ms'."""
    if count < 1e6:
        return f"{count / 1e3:.0f} us"
    if count < 1e9:
        return f"{count / 1e6:.1f} ms"
    return f"{count / 1e9:.1f} s" if count < 120e9 else f"{count / 60e9:.0f} min"


def signed(value: Any) -> int:
    """A counter of the vault as the rank meant it: unset steps are -1 in 64 bits."""
    number = int(value) if isinstance(value, (int, float)) else -1
    return number - (1 << 64) if number >= 1 << 63 else number


def overhead(stats: dict[str, Any]) -> str:
    """What snapshots cost a rank, from its counters."""
    return _voice.overhead(
        max(1, int(stats.get("every", 1))),
        signed(stats.get("overhead_ppm", 0)),
        signed(stats.get("overhead_noise_ppm", -1)),
    )


def step(value: Any) -> str:
    number = signed(value)
    return str(number) if number >= 0 else "-"
