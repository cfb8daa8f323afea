"""`reft plan`: what each protection would cost a job, and what it would survive."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import click
from rich.table import Table

from reft import _voice
from reft._cli import agents, native, pages, words
from reft._cli.options import Number
from reft._link.protection import AOR, PEER, is_copied, is_recomputed, placement

if TYPE_CHECKING:
    from reft._cli import odds

PLACEMENTS = ("none", "arc", "arc:2", "arc:3", "aec")
_GB = 1e9
_ALL = (*PLACEMENTS, AOR, PEER)
_COLORS = ("#888888", "#1f77b4", "#2a9d55", "#8c56a8", "#c0562f", "#4f6d7a", "#b8860b")
_POINTS = 60
_MOST_RANKS = 100_000


@dataclass
class Row:
    """One protection.

    Attributes:
        step_bytes: that a rank stores at each step.
        node_bytes: of host memory on a node, for all slots.
        times_state: host memory of a rank / the rank's state.
        lost_nodes: so many may be lost together, whichever.
        survival: probability that no shard is lost in the given days, without repair.
        days_until_lost: mean days until one is, with repair; None if none is before the universe
            ends.
    """

    protection: str
    step_bytes: float
    node_bytes: float
    times_state: float
    lost_nodes: int
    survival: float
    days_until_lost: float | None


@dataclass
class Plan:
    title: str
    rows: list[Row]
    curves: dict[str, list[tuple[float, float]]]
    """(days, survival) by protection."""
    notes: list[str]


def plan(
    shape: odds.Shape,
    state_bytes: float,
    slots: int,
    days: float,
    rate: float,
    weibull: float,
    repair_minutes: float,
) -> Plan:
    """What each protection costs and survives.

    Args:
        state_bytes: of one replica of the model, its optimizer included.
        slots: as REFT_SNAPSHOT_SLOTS.
        days: until when survival is computed.
        rate: failures of a node in a day, at first.
        weibull: 1 for a constant rate, more for one that grows.
        repair_minutes: from a loss until what was lost is stored again.
    """
    from reft import _C
    from reft._cli import odds

    nodes = shape.nodes_of_a_group
    of_rank = state_bytes / shape.parts
    rows, curves = [], {}
    for protection in _ALL:
        stored_by_ranks, copies = placement(protection), 1 + is_copied(protection)
        stored = of_rank / shape.replicas * _C.stored_shards(stored_by_ranks, nodes)
        lost, _ = _C.survival(stored_by_ranks, nodes)
        if copies > 1 and shape.nodes > 1:
            lost = max(lost, 1)
        # The second one of an optimizer's part is on the rank that arc stores it on.
        as_arc = stored_by_ranks if is_recomputed(protection) else protection
        until = odds.days_until_lost(as_arc, shape, rate, repair_minutes)
        second = of_rank / shape.replicas * is_recomputed(protection)

        def at(day: float, protection: str = as_arc) -> float:
            return odds.survives(protection, shape, odds.node_survives(day, rate, weibull))

        rows.append(
            Row(
                protection,
                stored,
                (copies * stored * slots + second) * shape.ranks_per_node,
                (copies * stored * slots + second) / of_rank,
                lost,
                at(days),
                None if math.isinf(until) else until,
            )
        )
        curves[protection] = [
            (days * i / _POINTS, at(days * i / _POINTS)) for i in range(_POINTS + 1)
        ]
    title = (
        f"{shape.nodes} nodes of {_voice.plural(shape.ranks_per_node, 'rank')},"
        f" {_voice.plural(shape.replicas, 'replica')} of {shape.parts} x {words.size(of_rank)}"
    )
    return Plan(title, rows, curves, _notes(shape, slots, days, rate, weibull, repair_minutes))


def _notes(
    shape: odds.Shape, slots: int, days: float, rate: float, weibull: float, repair_minutes: float
) -> list[str]:
    notes = [
        f"memory: {slots} slots (REFT_SNAPSHOT_SLOTS); small state comes on top.",
        f"survival: no shard is lost within {days:g} days if no lost node is replaced; a node fails"
        f" {rate:g} times a day (Weibull, shape {weibull:g}), independently of the others.",
        f"until loss: mean days until a shard is lost if a lost node is replaced, and all is stored"
        f" again, within {repair_minutes:g} minutes; constant rate.",
        "killed processes are survived by all of them: the agent keeps the vaults of its node.",
        "aor: as arc, for ZeroRedundancyOptimizer; a node's memory includes what its ranks compute a"
        " second time, with the parameters: Adam, AdamW and SGD of torch do without these.",
        "peer: a node also sends as much to another one at each step; for state without replicas,"
        " too.",
    ]
    if len(set(shape.nodes_of_a_group)) == 1:
        only = "only peer" if shape.nodes > 1 else "no protection"
        notes.append(f"all replicas of a part are on one node: {only} survives its loss.")
    return notes


def _cells(row: Row) -> list[str]:
    if row.days_until_lost is None:
        until = "never"
    elif row.days_until_lost > 3650:
        years = row.days_until_lost / 365
        until = f"{years:,.0f} years" if years < 1e7 else f"{years:.0e} years"
    else:
        until = f"{row.days_until_lost:.3g} days"
    return [
        row.protection,
        words.size(row.step_bytes),
        words.size(row.node_bytes),
        f"{row.times_state:.2f} x",
        str(row.lost_nodes),
        _odds(row.survival),
        until,
    ]


def _odds(value: float) -> str:
    """So many digits that it differs from 1."""
    if value in (0.0, 1.0):
        return f"{value:g}"
    digits = max(4, 2 - math.floor(math.log10(1 - value))) if value > 0.5 else 4
    return f"{value:.{min(digits, 15)}f}"


_HEADINGS = ["", "a step", "a node", "of state", "nodes", "survival", "until loss"]


def print_plan(made: Plan) -> None:
    """Prints a table that fits 80 columns."""
    console = words.console()
    console.print(made.title)
    console.print()
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for heading in _HEADINGS:
        table.add_column(heading, justify="right" if heading else "left", no_wrap=True)
    for row in made.rows:
        table.add_row(*_cells(row))
    console.print(table)
    console.print()
    for note in made.notes:
        console.print(note, style="dim")


def html_page(made: Plan) -> str:
    """One self-contained page: survival over time, and the table."""
    width, height, left, top = 640.0, 300.0, 60.0, 10.0
    days = made.curves[PLACEMENTS[0]][-1][0]
    lowest = min(odds for curve in made.curves.values() for _, odds in curve)
    floor = 0.0 if lowest < 0.5 else min(0.95, math.floor(lowest * 20) / 20)
    parts = []
    for i in range(6):
        value = floor + (1 - floor) * i / 5
        y = top + height * (1 - i / 5)
        parts.append(
            f'<line x1="{left}" y1="{y:.1f}" x2="{left + width}" y2="{y:.1f}" stroke="#ddd"/>'
            f'<text x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">{value:.2f}</text>'
        )
        x = left + width * i / 5
        parts.append(
            f'<text x="{x:.1f}" y="{top + height + 18}" text-anchor="middle">'
            f"{days * i / 5:.3g}</text>"
        )
    for color, (protection, curve) in zip(_COLORS, made.curves.items(), strict=True):
        scale = height / (1 - floor)
        points = " ".join(
            f"{left + width * day / days:.1f},{top + (1 - odds) * scale:.1f}"
            for day, odds in curve
        )
        parts.append(f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="2"/>')
        at = 20 * list(made.curves).index(protection)
        parts.append(
            f'<rect x="{left + width + 14}" y="{top + at}" width="12" height="12" fill="{color}"/>'
            f'<text x="{left + width + 32}" y="{top + at + 11}">{pages.escape(protection)}</text>'
        )
    parts.append(
        f'<text x="{left + width / 2}" y="{top + height + 38}" text-anchor="middle">days</text>'
    )
    chart = f'<svg width="800" height="{top + height + 46:.0f}">{"".join(parts)}</svg>'
    head = "".join(f"<th>{pages.escape(heading)}</th>" for heading in _HEADINGS)
    body = "".join(
        "<tr><td>" + "</td><td>".join(pages.escape(cell) for cell in _cells(row)) + "</td></tr>"
        for row in made.rows
    )
    table = f"<table><tr>{head}</tr>{body}</table>"
    notes = "".join(f"<p>{pages.escape(note)}</p>" for note in made.notes)
    lead = "Probability that no shard of the state is lost from memory, without repair."
    return pages.fill("chart", made.title, lead=lead, chart=chart, table=table, notes=notes)


@click.command("plan")
@click.option("--nodes", type=click.IntRange(1, 20_000), required=True)
@click.option("--ranks-per-node", type=click.IntRange(1, 64), default=8, show_default=True)
@click.option(
    "--replicas",
    type=click.IntRange(1, _MOST_RANKS),
    help="Data-parallel replicas of the model.  [default: one for each rank]",
)
@click.option(
    "--state-gb",
    type=Number(min=1e-6, max=1e9),
    required=True,
    help="State of one replica, optimizer included (mixed-precision Adam: 14 bytes a parameter).",
)
@click.option("--slots", type=click.IntRange(2, 3), default=2, show_default=True)
@click.option(
    "--days",
    type=Number(min=1e-3, max=1e5),
    default=7,
    show_default=True,
    help="Until when survival without repair is computed.",
)
@click.option(
    "--failures-per-day",
    type=Number(min=0, max=100),
    default=1e-3,
    show_default=True,
    help="Of one node.",
)
@click.option(
    "--weibull-shape",
    type=Number(min=0.1, max=10),
    default=1,
    show_default=True,
    help="1: failures come at a constant rate; more: at a growing one.",
)
@click.option(
    "--repair-minutes",
    type=Number(min=1e-3, max=1e6),
    default=10,
    show_default=True,
    help="From the loss of a node until what it had is stored again.",
)
@click.option(
    "--html", "html_file", type=click.Path(dir_okay=False), help="Also write a page with curves."
)
@click.option("--json", "as_json", is_flag=True, help="Print the plan as JSON.")
def command(
    nodes: int,
    ranks_per_node: int,
    replicas: int | None,
    state_gb: float,
    slots: int,
    days: float,
    failures_per_day: float,
    weibull_shape: float,
    repair_minutes: float,
    html_file: str | None,
    as_json: bool,
) -> None:
    """Compares the protections (REFT_SNAPSHOT_PROTECTION) for a job: bytes, and odds.

    Columns: bytes that a rank stores at each step; host memory of a node; the same as a multiple of
    the state; how many nodes may be lost together, whichever; the probability that no shard is lost
    without repair; and the mean time until one is, with repair. --json prints {"title", "rows",
    "curves", "notes"}.
    """
    native.need()

    from reft._cli import odds

    try:
        shape = odds.Shape(nodes, ranks_per_node, replicas or nodes * ranks_per_node)
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    made = plan(
        shape, state_gb * _GB, slots, days, failures_per_day, weibull_shape, repair_minutes
    )
    if html_file is not None:
        agents.write_file(html_file, html_page(made))
    if as_json:
        agents.print_json(asdict(made))
    else:
        print_plan(made)
