"""How numbers, and text that others wrote, are printed.

Every command prints through `console` or `echo`, and no other way: there, foreign text is made
harmless (`_voice.shown`), in tables, sentences and messages alike.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import click
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from reft import _voice
from reft._voice import percent, shown, size

__all__ = [
    "console", "echo", "fold", "nanoseconds", "overhead", "percent", "print_folded", "shown",
    "signed", "size", "step",
]  # fmt: skip


class _Console(Console):
    """Shows foreign text as escapes; rich's own control sequences are segments of their own."""

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            text = segment.text if segment.control else shown(segment.text)
            yield Segment(text, segment.style, segment.control)


def console() -> Console:
    """Text goes to stdout as it is: no markup, no emoji, no highlighting."""
    return _Console(highlight=False, emoji=False, markup=False, soft_wrap=False)


def echo(text: str, *, err: bool = False) -> None:
    """Prints lines to stdout, or stderr."""
    click.echo(shown(text), err=err)


def fold(text: str, width: int) -> list[str]:
    """Lines of at most `width` characters: broken at spaces, and long words after / , : or =.

    A piece of a word that is longer still has a line of its own, whole: the terminal wraps it, and
    what a user copies from there is a path.
    """
    lines = [""]
    for word in re.findall(r"\S+\s*", text):
        pieces = (
            [word] if len(word.rstrip()) <= width else re.findall(r"[^/,:=]*[/,:=]|[^/,:=]+", word)
        )
        for piece in pieces:
            if lines[-1] and len(lines[-1]) + len(piece.rstrip()) > width:
                lines.append("")
            lines[-1] += piece
    return [line.rstrip() for line in lines]


def print_folded(console: Console, head: Text, text: Text) -> None:
    """Prints `text` behind `head`, its further lines below its first."""
    lines = fold(text.plain, max(20, console.width - len(head)))
    for number, line in enumerate(lines):
        before = head if number == 0 else Text(" " * len(head))
        console.print(Text.assemble(before, (line, text.style)), soft_wrap=True)


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
