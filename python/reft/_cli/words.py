"""How numbers, and text that others wrote, are printed."""

from __future__ import annotations

from typing import Any

from rich.console import Console


def console() -> Console:
    """Text goes to stdout as it is: no emoji, no highlighting."""
    return Console(highlight=False, emoji=False, soft_wrap=False)


def printable(text: str) -> str:
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def size(count: float) -> str:
    """1536 → '1.5 KiB'."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(count) < 1024 or unit == "TiB":
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return ""


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


def percent(ppm: int) -> str:
    """12345 → '1.2 %'; small ones keep two digits."""
    return f"{ppm / 1e4:.1f} %" if abs(ppm) >= 10_000 else f"{ppm / 1e4:.2f} %"


def overhead(stats: dict[str, Any]) -> str:
    """What snapshots cost a rank, as it has measured by steps without a copy beside them."""
    every = max(1, int(stats.get("every", 1)))
    rhythm = "at every step" if every == 1 else f"every {every} steps"
    noise = signed(stats.get("overhead_noise_ppm", -1))
    if noise < 0:
        return f"snapshots {rhythm}; what they cost is not measured yet"
    cost = signed(stats.get("overhead_ppm", 0))
    known = "measured" if cost > noise else "measured: no more than noise"
    return f"snapshots {rhythm} cost {percent(cost)} ± {percent(noise)} ({known})"


def step(value: Any) -> str:
    number = signed(value)
    return str(number) if number >= 0 else "-"
