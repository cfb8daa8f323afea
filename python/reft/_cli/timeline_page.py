"""A timeline as one HTML file: for each rank its steps, the gaps in which the host is idle, and the
copies that reft placed.

The page loads nothing and runs no script. A bar has a tooltip.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from reft._cli import pages, words
from reft._cli.pages import escape as _text
from reft._cli.timeline import TIERS, Interval, Rank

_WIDTH, _LEFT = 1340, 96
_ROW = {"ops": 22, "copies": 16, "reft": 8}
_BETWEEN, _TOP = 30, 34
_LEAST_PX = 0.7  # narrower bars are drawn so wide
_COPY_CLASS = {
    "at once": "now",
    "gap": "gap",
    "compute": "under",
    "communication": "link",
    "gate": "late",
}
_MEANING = {
    "at once": "before the program point returned (training waited)",
    "gap": "while the rank waited anyway",
    "compute": "during compute",
    "communication": "during communication",
    "gate": "at the gate, because time had run out (training waited)",
}


class _Drawing:
    def __init__(self, begin: int, end: int) -> None:
        self.begin = begin
        self.scale = (_WIDTH - _LEFT) / max(1, end - begin)
        self.parts: list[str] = []

    def x(self, at: int) -> float:
        return min(float(_WIDTH), max(float(_LEFT), _LEFT + (at - self.begin) * self.scale))

    def bars(self, intervals: Iterable[Interval], kind: str, top: float, height: float) -> None:
        drawn_to = -1.0
        for it in sorted(intervals, key=lambda it: it.begin):
            left, right = self.x(it.begin), self.x(it.end)
            width = max(right - left, _LEAST_PX)
            if (
                left + width <= drawn_to + _LEAST_PX / 2
            ):  # hardly more than the bar that is there: thousands of small ops
                continue
            drawn_to = left + width
            title = (
                f"{it.name}: {words.nanoseconds(it.end - it.begin)}, {it.details}"
                if it.details
                else it.name
            )
            self.parts.append(
                f'<rect class="{kind}" x="{left:.1f}" y="{top:.0f}" width="{width:.1f}" height="{height:.0f}">'
                f"<title>{_text(title)}</title></rect>"
            )

    def text(self, x: float, y: float, text: str, kind: str = "", anchor: str = "start") -> None:
        self.parts.append(
            f'<text class="{kind}" x="{x:.0f}" y="{y:.0f}" text-anchor="{anchor}">{_text(text)}</text>'
        )


def _ticks(nanoseconds: int) -> list[int]:
    """Round distances, about ten in all, in nanoseconds."""
    unit = 1
    while nanoseconds > 100 * unit:
        unit *= 10
    unit = next(unit * factor for factor in (1, 2, 5, 10) if nanoseconds <= 12 * unit * factor)
    return list(range(0, nanoseconds, unit))


def _drawing(begin: int, end: int, ranks: Sequence[Rank]) -> str:
    draw = _Drawing(begin, end)
    for tick in _ticks(end - begin):
        x = draw.x(begin + tick)
        anchor = "start" if not tick else "end" if x > _WIDTH - 40 else "middle"
        draw.text(x, 14, f"{tick / 1e6:g} ms", "soft", anchor)
    y = float(_TOP)
    for rank in ranks:
        draw.text(0, y + 15, f"rank {rank.rank}" + (", device" if rank.device else ""))
        draw.bars([Interval(begin, end, "computing")], "busy", y, _ROW["ops"])
        draw.bars(rank.gaps, "idle", y, _ROW["ops"])
        draw.bars(rank.ops, "op", y + _ROW["ops"] - 5, 5)
        copies = y + _ROW["ops"] + 3
        draw.text(0, copies + 12, "copies", "soft")
        for tier in TIERS:
            draw.bars(rank.copies[tier], _COPY_CLASS[tier], copies, _ROW["copies"])
        stalls = copies + _ROW["copies"] + 2
        # The host is ahead of its device: what it does at a program point takes nothing from
        # training.
        draw.bars(
            rank.gates if rank.device else [*rank.captures, *rank.gates],
            "stall",
            stalls,
            _ROW["reft"],
        )
        draw.bars(rank.seals, "seal", stalls, _ROW["reft"])
        bottom = stalls + _ROW["reft"]
        for step in rank.steps:
            x = draw.x(step.begin)
            if step.begin >= begin:
                draw.parts.append(
                    f'<line class="mark" x1="{x:.1f}" x2="{x:.1f}" y1="{y - 4:.0f}" y2="{bottom + 4:.0f}"/>'
                )
            if draw.x(step.end) - x > 46:
                draw.text(
                    (x + draw.x(step.end)) / 2, bottom + 14, f"step {step.number}", "soft", "middle"
                )
        y = bottom + _BETWEEN
    picture = "".join(draw.parts)
    return f'<svg viewBox="0 0 {_WIDTH} {y:.0f}" role="img" aria-label="Timeline of the ranks">{picture}</svg>'


def page(
    job: str,
    sentence: str,
    window: tuple[int, int],
    ranks: Sequence[Rank],
    table: tuple[Sequence[str], Sequence[Sequence[str]]],
) -> str:
    """The whole page. `window`: first and last instant; `table`: headings, and rows of cells."""
    head = "".join(f"<th>{_text(name)}</th>" for name in table[0])
    rows = "".join(
        "<tr>" + "".join(f"<td>{_text(cell)}</td>" for cell in row) + "</tr>" for row in table[1]
    )
    who = " or ".join(sorted({rank.waits for rank in ranks}, reverse=True)) or "host"
    asked = "a collective or message is in flight"
    if any(rank.device for rank in ranks):
        asked = (
            "the host enqueues a collective or message"
            if all(rank.device for rank in ranks)
            else f"{asked} (on a device: the host enqueues it)"
        )
    swatches = [
        ("busy", "the rank computes"),
        ("idle", f"gap: the {who} waits for others"),
        ("op", asked),
    ]
    swatches += [
        (_COPY_CLASS[tier], f"copied {_MEANING[tier]}")
        for tier in ("gap", "compute", "communication")
    ]
    stalls = (
        "the gate"
        if all(rank.device for rank in ranks)
        else "capture at the program point, the gate"
    )
    swatches += [("stall", f"training waits for reft: {stalls}"), ("seal", "verified and sealed")]
    legend = "".join(
        f'<span><i class="{kind}"></i>{_text(meaning)}</span>' for kind, meaning in swatches
    )
    return pages.fill(
        "timeline",
        f"{job}: timeline",
        job=_text(job),
        sentence=_text(sentence),
        table=f"<table><tr>{head}</tr>{rows}</table>",
        legend=legend,
        drawing=_drawing(*window, ranks),
    )
