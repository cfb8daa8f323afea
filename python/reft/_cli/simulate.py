"""`reft simulate`: what snapshots would cost a hypothetical job."""

from __future__ import annotations

import json
import threading
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field
from typing import Any

import click
from click.core import ParameterSource
from rich.table import Table

from reft._cli import agents, native, pages, words
from reft._cli.options import Number

POLICIES = ("gap", "eager", "sync", "paper")
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero-bubble", "ddp", "fsdp")
TIERS = ("at once", "gap", "compute", "communication", "gate")
_GIB = 1 << 30


@dataclass
class Row:
    """One simulated job: how long a step takes, with and without snapshots, and where the bytes
    went.

    Attributes:
        overhead: mean step with snapshots / without - 1, the same jitter in both.
        paper: the paper's figure for the case, "" if it gives none.
    """

    case: str
    variant: str
    ranks: int
    iteration_sec: float
    overhead: float
    stall_sec: float
    share: dict[str, float]
    error_median: float
    overrun_chunks: float
    paper: str = ""


@dataclass
class Report:
    title: str
    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def run(options: dict[str, Any]) -> dict[str, Any]:
    """One run of the native simulator.

    Raises:
        click.UsageError: the options make no sense.
    """
    native.need()

    from reft import _C

    # In a thread, because the simulator looks for no signals: Ctrl-C ends the command, and the
    # thread with it.
    answer: Future[str] = Future()

    def simulate() -> None:
        try:
            answer.set_result(_C.simulate(json.dumps(options)))
        except BaseException as error:
            answer.set_exception(error)

    threading.Thread(target=simulate, name="reft-simulate", daemon=True).start()
    try:
        result: dict[str, Any] = json.loads(answer.result())
    except _C.InvalidArgument as error:
        raise click.UsageError(str(error)) from error
    return result


class Comparer:
    """Runs variants of one job beside the same job without snapshots."""

    def __init__(self, report: Report, case: str, job: dict[str, Any]) -> None:
        self._report = report
        self._case = case
        self._job = {"overhead_limit": 0.0, **job}  # a snapshot at every step, whatever it costs
        without = run({**self._job, "snapshot_bytes": 0})
        self._without = float(without["iteration_ns"])
        self._row("none", without, "")

    def add(self, variant: str, policy: str, snapshot_bytes: float, paper: str = "") -> None:
        self._row(
            variant,
            run({**self._job, "policy": policy, "snapshot_bytes": int(snapshot_bytes)}),
            paper,
        )

    def _row(self, variant: str, result: dict[str, Any], paper: str) -> None:
        total = sum(result["bytes"].values())
        self._report.rows.append(
            Row(
                case=self._case,
                variant=variant,
                ranks=int(self._job["stages"]) * int(self._job["replicas"]),
                iteration_sec=result["iteration_ns"] / 1e9,
                overhead=result["iteration_ns"] / self._without - 1,
                stall_sec=result["stall_ns"] / 1e9,
                share={tier: result["bytes"][tier] / total if total else 0.0 for tier in TIERS},
                error_median=result["error_median"],
                overrun_chunks=result["longest_overrun_chunks"],
                paper=paper,
            )
        )


# Bytes of state per parameter: 2 for the weights, 12 for fp32 weights and Adam's two moments.
_STATE = 14


def paper_report(most_ranks: int) -> Report:
    """The comparisons of REFT's paper. The notes list what its text leaves open."""
    report = Report("REFT's comparisons, simulated")
    # V100 cluster, 34B parameters on 512 GPUs: TP4 PP16 DP8 is assumed. One simulated rank stands
    # for its tensor-parallel group.
    state = _STATE * 34e9 / (4 * 16)
    hybrid = {
        "schedule": "1f1b", "stages": 16, "replicas": 8, "micro_batches": 64, "forward_ns": 35_000_000,
        "backward_ns": 70_000_000, "optimizer_ns": 40_000_000, "gradient_bytes": int(2 * 34e9 / 64),
        "activation_bytes": 32 << 20, "link_bytes_per_sec": 10e9, "copy_bytes_per_sec": 6e9, "chunk_bytes": 16 << 20,
        "compute_slowdown": 1.5, "communication_slowdown": 1.5, "jitter": 0.02, "steps": 24, "warm_up_steps": 8,
    }  # fmt: skip
    compare = Comparer(report, "34B, 512 V100, TP4 PP16 DP8", hybrid)
    compare.add(
        "eager, not sharded", "eager", state, "existing asynchronous: 22 % under hybrid parallelism"
    )
    compare.add("eager, sharded", "eager", state / 8)
    compare.add("sync, sharded", "sync", state / 8)
    compare.add("paper's formula, sharded", "paper", state / 8)
    compare.add("gap, sharded", "gap", state / 8, "HAS: near zero; > 17 % faster than existing")
    compare.add("gap, sharded, ARC", "gap", 2 * state / 8, "ARC: 1 %")
    # Data parallelism: a small share of state per device and long iterations.
    data = {
        **hybrid, "schedule": "ddp", "stages": 1, "replicas": 64, "micro_batches": 16, "forward_ns": 50_000_000,
        "backward_ns": 100_000_000, "gradient_bytes": int(2 * 1.3e9), "layers": 24,
    }  # fmt: skip
    state = _STATE * 1.3e9
    compare = Comparer(report, "1.3B, 64 V100, DP64", data)
    compare.add(
        "eager, sharded", "eager", state / 64, "existing asynchronous: 1 % under data parallelism"
    )
    compare.add("gap, sharded", "gap", state / 64, "HAS: near zero")
    # Frontier: 34B, DP16 PP4 TP8; the iteration is set to the paper's.
    state = _STATE * 34e9 / (8 * 4)
    frontier = {
        **hybrid, "stages": 4, "replicas": 16, "micro_batches": 32, "forward_ns": 58_000_000, "backward_ns": 116_000_000,
        "gradient_bytes": int(2 * 34e9 / 32), "link_bytes_per_sec": 25e9, "copy_bytes_per_sec": 20e9,
    }  # fmt: skip
    compare = Comparer(report, "34B, 512 MI250X, TP8 PP4 DP16", frontier)
    compare.add("eager, not sharded", "eager", state)
    compare.add("gap, sharded, ARC", "gap", 2 * state / 16, "ARC: 6.26 s -> 6.32 s (1 %)")
    # Weak scaling: replicas are added, each with its own batch.
    replicas = 1
    while replicas * 8 <= most_ranks:
        scaled = {**hybrid, "stages": 8, "replicas": replicas, "micro_batches": 24, "steps": 16}
        state = _STATE * 6.7e9 / (4 * 8)
        compare = Comparer(report, f"weak scaling, 6.7B, PP8 DP{replicas}", scaled)
        compare.add("gap, sharded", "gap", state / replicas, "HAS: below 3 % at all sizes")
        compare.add("eager, not sharded", "eager", state)
        replicas *= 4
    report.notes = [
        "Simulated. The paper measured its figures on real clusters; all others come from a model.",
        "Assumed, because the paper does not state it: micro-batches and their times, the split of"
        " the 512 V100, 14 bytes of state per parameter, copies at 6 GB/s (V100) and 20 GB/s"
        " (MI250X), work 1.5 times slower during a full-rate copy, 2 % jitter.",
        "A snapshot is taken at every step in all rows; the limit on overhead that would make them rarer is off.",
    ]
    return report


def custom_report(job: dict[str, Any], policies: tuple[str, ...], snapshot_bytes: float) -> Report:
    """The given job under each of the policies."""
    report = Report(
        f"{job['schedule']}, {job['stages']} stages x {job['replicas']} replicas, simulated"
    )
    compare = Comparer(report, str(job["schedule"]), job)
    for policy in policies:
        compare.add(policy, policy, snapshot_bytes)
    report.notes = ["Simulated; a snapshot at every step."]
    return report


def _cells(row: Row) -> list[str]:
    shares = [f"{100 * row.share[tier]:.0f}" if any(row.share.values()) else "" for tier in TIERS]
    return [
        row.variant,
        str(row.ranks),
        f"{row.iteration_sec:.3f}",
        ""
        if row.variant == "none"
        else f"{100 * row.overhead + 0.0:+.2f}".replace("-0.00", "+0.00"),
        *shares,
        f"{100 * row.error_median:.1f}",
        row.paper,
    ]


_HEADINGS = [
    "snapshots",
    "ranks",
    "step, s",
    "cost, %",
    *(f"{tier}, %" for tier in TIERS),
    "error, %",
    "the paper's figure",
]


def print_report(report: Report) -> None:
    """Prints tables that fit 80 columns, with the paper's figures below them."""
    console = words.console()
    console.print(report.title)
    for case in dict.fromkeys(row.case for row in report.rows):
        rows = [row for row in report.rows if row.case == case]
        console.print()
        console.print(f"{case}, {rows[0].ranks} ranks", style="bold")
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
        for heading in [
            "snapshots",
            "step s",
            "cost %",
            "once %",
            "gap %",
            "comp %",
            "comm %",
            "gate %",
        ]:
            table.add_column(
                heading,
                justify="left" if heading == "snapshots" else "right",
                no_wrap=heading != "snapshots",
            )
        for row in rows:
            table.add_row(*[cell for i, cell in enumerate(_cells(row)[:-2]) if i != 1])
        console.print(table)
        for row in rows:
            if row.paper:
                console.print(f"the paper, {row.variant}: {row.paper}", style="dim")
        if worst := max(row.error_median for row in rows):
            console.print(
                f"prediction error of gaps: up to {100 * worst:.1f} % (median over a row's gaps)",
                style="dim",
            )
    console.print()
    for note in report.notes:
        console.print(note)


def html_page(report: Report) -> str:
    """One self-contained page: a bar per row with its cost, and the table."""
    rows = [row for row in report.rows if row.variant != "none"]
    longest = max((max(row.overhead, 0.0) for row in rows), default=0.0) or 1.0
    bars = []
    for i, row in enumerate(rows):
        top = 22 * i
        width = 380 * max(row.overhead, 0.0) / longest
        color = "#2a9d55" if row.variant.startswith("gap") else "#c0562f"
        label = pages.escape(f"{row.case}: {row.variant}")
        bars.append(
            f'<text x="395" y="{top + 15}" text-anchor="end">{label}</text>'
            f'<rect x="400" y="{top + 3}" width="{width:.1f}" height="16" fill="{color}"/>'
            f'<text x="{405 + width:.1f}" y="{top + 15}">{100 * row.overhead:.2f} %</text>'
        )
    body = "".join(
        "<tr><td>"
        + "</td><td>".join(pages.escape(cell) for cell in [row.case, *_cells(row)])
        + "</td></tr>"
        for row in report.rows
    )
    head = "".join(f"<th>{pages.escape(heading)}</th>" for heading in ["case", *_HEADINGS])
    notes = "".join(f"<p>{pages.escape(note)}</p>" for note in report.notes)
    chart = f'<svg width="900" height="{22 * len(rows) + 6}">{"".join(bars)}</svg>'
    table = f"<table><tr>{head}</tr>{body}</table>"
    lead = "Overhead of snapshots: how much longer a step takes."
    return pages.fill("chart", report.title, lead=lead, chart=chart, table=table, notes=notes)


_MOST_RANKS = 10240
_MSEC = Number(min=0, max=1e6)
_SIZE_GIB = Number(min=0, max=1e6)
_RATE = Number(min=1e-3, max=1e6)


@click.command("simulate")
@click.option(
    "--paper",
    is_flag=True,
    help="Simulate the comparisons of REFT's paper, with its figures, instead of your own job.",
)
@click.option(
    "--most-ranks",
    type=click.IntRange(8, _MOST_RANKS),
    default=512,
    show_default=True,
    help="Ranks of the largest weak-scaling job in --paper.",
)
@click.option("--schedule", type=click.Choice(SCHEDULES), default="1f1b", show_default=True)
@click.option(
    "--stages",
    type=click.IntRange(1, 1024),
    default=4,
    show_default=True,
    help="Pipeline stages; 1 for ddp and fsdp.",
)
@click.option(
    "--replicas",
    type=click.IntRange(1, _MOST_RANKS),
    default=1,
    show_default=True,
    help="Data-parallel replicas of each stage.",
)
@click.option("--micro-batches", type=click.IntRange(1, 4096), default=8, show_default=True)
@click.option(
    "--forward-ms",
    type=_MSEC,
    default=10,
    show_default=True,
    help="Forward time of one micro-batch on one rank.",
)
@click.option(
    "--backward-ms",
    type=_MSEC,
    default=20,
    show_default=True,
    help="Backward time of one micro-batch on one rank.",
)
@click.option(
    "--snapshot-gib",
    type=_SIZE_GIB,
    default=0.5,
    show_default=True,
    help="Bytes of a rank's snapshot.",
)
@click.option(
    "--gradient-gib",
    type=_SIZE_GIB,
    default=0.25,
    show_default=True,
    help="Gradients reduced over the replicas.",
)
@click.option("--copy-gb-per-sec", type=_RATE, default=10, show_default=True)
@click.option("--link-gb-per-sec", type=_RATE, default=10, show_default=True)
@click.option(
    "--slowdown",
    type=Number(min=1, max=1000),
    default=1.3,
    show_default=True,
    help="Slowdown factor of work and links during a copy at full rate.",
)
@click.option(
    "--jitter",
    type=Number(min=0, max=1),
    default=0.02,
    show_default=True,
    help="Relative jitter of each piece of work.",
)
@click.option("--chunk-mib", type=Number(min=1 / 16, max=1024), default=4, show_default=True)
@click.option("--steps", type=click.IntRange(12, 100000), default=40, show_default=True)
@click.option("--policy", type=click.Choice(POLICIES), multiple=True, help="Default: all of them.")
@click.option(
    "--html",
    "html_file",
    type=click.Path(dir_okay=False),
    help="Also write a page with a plot to this file.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(
    paper: bool,
    most_ranks: int,
    schedule: str,
    stages: int,
    replicas: int,
    micro_batches: int,
    forward_ms: float,
    backward_ms: float,
    snapshot_gib: float,
    gradient_gib: float,
    copy_gb_per_sec: float,
    link_gb_per_sec: float,
    slowdown: float,
    jitter: float,
    chunk_mib: float,
    steps: int,
    policy: tuple[str, ...],
    html_file: str | None,
    as_json: bool,
) -> None:
    """Simulates the placement of copies in a hypothetical training job.

    The command runs the placement code of real ranks, and simulates time, work and links.
    Columns: step time, overhead, and where the bytes were copied: in idle gaps, overlapped with
    compute or with communication, or at the gate while training waited. Below the table: the
    median error of the predicted gaps. docs/placement.md describes the model. --json prints
    {"title", "rows", "notes"}.
    """
    if paper:
        given = click.get_current_context()
        others = set(given.params) - {"paper", "most_ranks", "html_file", "as_json"}
        if wrong := [
            name
            for name in sorted(others)
            if given.get_parameter_source(name) is ParameterSource.COMMANDLINE
        ]:
            raise click.UsageError(
                f"--paper simulates fixed jobs; --{wrong[0].replace('_', '-')} has no effect"
            )
        report = paper_report(most_ranks)
    else:
        stages = 1 if schedule in ("ddp", "fsdp") else stages
        if (ranks := stages * replicas) > _MOST_RANKS:
            raise click.UsageError(
                f"{stages} stages x {replicas} replicas are {ranks} ranks,"
                f" but the limit is {_MOST_RANKS}"
            )
        job = {
            "schedule": schedule,
            "stages": stages,
            "replicas": replicas,
            "micro_batches": micro_batches,
            "forward_ns": int(forward_ms * 1e6),
            "backward_ns": int(backward_ms * 1e6),
            "gradient_bytes": int(gradient_gib * _GIB),
            "copy_bytes_per_sec": copy_gb_per_sec * 1e9,
            "link_bytes_per_sec": link_gb_per_sec * 1e9,
            "compute_slowdown": slowdown,
            "communication_slowdown": slowdown,
            "jitter": jitter,
            "chunk_bytes": int(chunk_mib * (1 << 20)),
            "steps": steps,
        }
        report = custom_report(job, policy or POLICIES, snapshot_gib * _GIB)
    if html_file is not None:
        agents.write_file(html_file, html_page(report))
    if as_json:
        agents.print_json(asdict(report))
    else:
        print_report(report)
