"""The one voice of a rank on the terminal: lines, warnings, and how figures are written in them.

Every line goes to standard error and begins with `reft: `. Details for developers go to the log
instead (`debug`), which REFT_LOG governs (`REFT_LOG=reft.python=debug`). Threads of C++ that must
not wait for the interpreter write through `intercept/base/voice.h`.

Names, paths, stacks and messages come from programs, other ranks and files, so all printed text
goes through `shown` first, here and in the command line.

Threads: any. Errors: none; a line that cannot be written is lost.
"""

from __future__ import annotations

import contextlib
import re
import sys
import threading
from collections.abc import Iterable, Iterator

# Characters without a picture of their own that Python counts as printable: joiners, fillers and
# variation selectors.
_UNSEEN = re.compile(
    "[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180d\u180f\u2800\u3164\ufe00-\ufe0f\uffa0"
    "\U000e0100-\U000e01ef]"
)
_MOST_IN_LINE = 4096
_MOST_LINES = 50_000

_print = print  # a script that puts another one in its place means its own lines
_warned: set[str] = set()  # kinds; one process is one terminal


def say(text: str) -> None:
    """Writes one line."""
    try:
        _print(f"reft: {shown(text)}", file=sys.stderr, flush=True)
    except (OSError, ValueError, AttributeError):  # closed, or no standard error at all
        pass


@contextlib.contextmanager
def said_after(seconds: float, text: str) -> Iterator[None]:
    """Says `text` once if what runs within this takes longer."""
    timer = threading.Timer(seconds, say, (text,))
    timer.daemon = True
    with contextlib.suppress(RuntimeError):  # no thread can be started
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


def warn(text: str) -> None:
    """Writes a warning."""
    say(f"warning: {text}")


def warn_once(kind: str, text: str) -> None:
    """Writes a warning, the first of its kind in this process; later ones go to the log."""
    if kind in _warned:
        debug(text)
        return
    _warned.add(kind)
    warn(text)


def debug(text: str) -> None:
    """Writes to the log `reft.python`."""
    from reft import _C

    _C.log_debug(text)


def shown(text: str) -> str:
    """The text as a terminal or a page shows it and does nothing else.

    Control characters, among them those of escape sequences, marks that turn the direction of text,
    and invisible characters are written as Python writes them: `\\x1b`. Lines stay lines; what
    exceeds 4096 characters of a line, or 50,000 lines, is counted.
    """
    lines = text.split("\n", _MOST_LINES)
    rest = lines.pop() if len(lines) > _MOST_LINES else ""
    if rest:
        lines.append(f"... ({rest.count(chr(10)) + 1} more lines)")
    return "\n".join(map(_shown_line, lines))


def _shown_line(line: str) -> str:
    if len(line) > _MOST_IN_LINE:
        more = len(line) - _MOST_IN_LINE
        return f"{_shown_line(line[:_MOST_IN_LINE])}... ({more} more characters)"
    if line.isprintable() and not _UNSEEN.search(line):
        return line
    return "".join(
        letter
        if letter.isprintable() and not _UNSEEN.match(letter)
        else letter.encode("unicode_escape").decode()
        for letter in line
    )


def size(count: float) -> str:
    """1536 → '1.5 KiB'."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(count) < 1024 or unit == "TiB":
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return ""


def ranks(numbers: Iterable[int]) -> str:
    """[3] → 'rank 3'; [0, 1, 2, 5] → 'ranks 0-2 5', as in hang reports."""
    known = sorted(set(numbers))
    if not known:
        return "no rank"
    spans: list[list[int]] = []
    for number in known:
        if spans and spans[-1][1] == number - 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    texts: list[str] = []
    for low, high in spans:
        texts += [f"{low}-{high}"] if high > low + 1 else map(str, sorted({low, high}))
    return ("rank " if len(known) == 1 else "ranks ") + " ".join(texts)


def rhythm(every: int) -> str:
    """How often snapshots are taken."""
    return "every step" if every == 1 else f"every {every} steps"


def overhead(every: int, overhead_ppm: int, noise_ppm: int) -> str:
    """What snapshots cost, as steps without a copy have measured it.

    Args:
        every: a snapshot at each so many steps.
        overhead_ppm: how much longer the mean step takes, in millionths.
        noise_ppm: half the width of the interval around it; negative if nothing is measured yet.
    """
    snapshots = f"a snapshot {rhythm(every)}"
    if noise_ppm < 0:
        return f"{snapshots}; overhead not measured yet"
    if overhead_ppm <= noise_ppm:
        most = max(overhead_ppm + noise_ppm, noise_ppm)
        return f"{snapshots} costs at most {percent(most)} of the mean step (within noise)"
    figure = f"{percent(overhead_ppm)} ± {percent(noise_ppm)}"
    return f"{snapshots} costs {figure} of the mean step (measured)"


def percent(ppm: int) -> str:
    """12345 → '1.2 %'; figures below 1 % keep two digits."""
    return f"{ppm / 1e4:.1f} %" if abs(ppm) >= 10_000 else f"{ppm / 1e4:.2f} %"


def plural(count: int, noun: str) -> str:
    """(1, 'tensor') → '1 tensor'; (3, 'tensor') → '3 tensors'."""
    return f"{count} {noun}{'' if count == 1 else 's'}"
