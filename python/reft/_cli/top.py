"""`reft top`: a live table of what every rank does and what is protected."""

from __future__ import annotations

import sys
import time
from typing import Any

import click
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from reft._cli import agents, words
from reft._cli.options import Number
from reft._link import agent_protocol as protocol


def _stats(rank: dict[str, Any]) -> dict[str, Any]:
    return {
        **rank.get("stats", {}),
        **{key: value for key, value in rank.items() if key != "stats"},
    }


def _state(stats: dict[str, Any]) -> Text:
    if stats.get("said_bye"):
        return Text("ended")
    if not stats.get("alive", True):
        return Text("gone", style="bold red")
    if stats.get("unprotected"):
        return Text("UNPROTECTED", style="bold red")
    if words.signed(stats.get("committed_step", -1)) < 0:
        return Text("starting", style="yellow")
    return Text("protected", style="green")


def _places(ranks: list[dict[str, Any]]) -> str:
    """When the bytes of all ranks were copied; empty if unknown."""
    every = [_stats(rank) for rank in ranks]
    copied = sum(int(stats.get("bytes_copied", 0)) for stats in every)
    names = {"gap": "gaps", "compute": "work", "communication": "collectives", "gate": "gate"}
    bytes_of = {
        name: sum(int(stats.get(f"{tier}_copied_bytes", 0)) for stats in every)
        for tier, name in names.items()
    }
    if not copied or not any(bytes_of.values()):
        return ""
    bytes_of["program point"] = max(0, copied - sum(bytes_of.values()))
    return "copied in: " + ", ".join(
        f"{name} {100 * count / copied:.0f} %" for name, count in bytes_of.items()
    )


def _cost(ranks: list[dict[str, Any]]) -> str:
    """What snapshots cost and how well gaps are predicted; empty if the ranks do not report it."""
    told = [stats for stats in map(_stats, ranks) if "overhead_ppm" in stats]
    if not told:
        return ""
    known = [stats for stats in told if words.signed(stats["overhead_noise_ppm"]) >= 0]
    costs = sorted(known, key=lambda stats: words.signed(stats["overhead_ppm"]))
    text = words.overhead(costs[len(costs) // 2] if costs else told[0])
    if errors := sorted(
        error for stats in told if (error := int(stats.get("forecast_error_ppm", 0)))
    ):
        text += f"; gap prediction error {errors[len(errors) // 2] / 1e4:.0f} %"
    return text


def _row(rank: dict[str, Any]) -> tuple[list[str], Text]:
    stats = _stats(rank)
    # A host that is ahead of its device takes nothing from it.
    stalls = (
        ("device_gate_last_ns",) if stats.get("on_device") else ("gate_last_ns", "capture_last_ns")
    )
    stall = sum(int(stats.get(name, 0)) for name in stalls)
    step_ns = int(stats.get("step_ns", 0))
    cells = [
        str(stats.get("rank", "?")),
        words.step(stats.get("steps", -1)),
        words.nanoseconds(step_ns) if step_ns else "-",
        words.step(stats.get("committed_step", -1)),
        words.nanoseconds(stall) if words.signed(stats.get("sealed_step", -1)) >= 0 else "-",
        words.size(int(stats.get("bytes_copied", 0))),
        f"{stats.get('dropped', 0)}/{stats.get('skipped', 0)}",
    ]
    return cells, _state(stats)


def render(statuses: list[dict[str, Any]]) -> Group:
    """One block per agent: a line about it, a table of its ranks, and their notes."""
    parts: list[Any] = []
    for status in statuses:
        ranks = sorted(status.get("ranks", []), key=lambda rank: int(rank.get("rank", 0)))
        alive = sum(1 for rank in ranks if rank.get("alive", True))
        parts.append(
            Text(
                f"job {status.get('job', '?')}  node {status.get('node', '?')}  agent {status.get('agent_pid', '?')}  ",
                style="bold",
            )
            + Text(
                f"{alive} of {len(ranks)} ranks alive",
                style="red bold" if alive < len(ranks) else "",
            )
        )
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
        for name in ("rank", "step", "step time", "committed", "stall", "copied", "drop/skip"):
            table.add_column(name, justify="right", no_wrap=True)
        table.add_column("state", no_wrap=True)
        notes: dict[str, list[int]] = {}
        for rank in ranks:
            cells, state = _row(rank)
            table.add_row(*cells, state)
            note = str(_stats(rank).get("note", "")).strip()
            if note:
                notes.setdefault(note, []).append(int(rank.get("rank", -1)))
        parts.append(table)
        if places := _places(ranks):
            parts.append(Text(places, style="dim"))
        if cost := _cost(ranks):
            parts.append(Text(cost, style="dim"))
        for note, who in notes.items():
            parts.append(
                Text(
                    f"rank{'s' if len(who) > 1 else ''} {' '.join(map(str, who))}: {note}",
                    style="yellow",
                )
            )
        for found in status.get("disagreements", []):
            lines = str(found.get("text", "")).splitlines()
            text = "\n    ".join(lines)
            parts.append(Text(f"ranks disagree about an op: {text}", style="red"))
        if status is not statuses[-1]:
            parts.append(Text())
    return Group(*parts)


def _collect(found: list[agents.Agent]) -> list[dict[str, Any]]:
    statuses = []
    problems: list[agents.Failure] = []
    for agent in found:
        try:
            status, _ = agent.ask(protocol.STATUS_REQUEST)
            statuses.append({"job": agent.job, "node": agent.node, **status})
        except agents.Failure as problem:
            problems.append(problem)
    if not statuses and problems:
        raise problems[0]
    return statuses


def _find(directory: Any, job: str | None) -> list[agents.Agent]:
    if job is None and (found := agents.find(directory)):
        return found
    return agents.select(directory, job)  # raises with the right sentence


def _live(directory: Any, job: str | None, interval: float, console: Console) -> None:
    with Live(console=console, screen=console.is_terminal, auto_refresh=False) as live:
        while True:
            try:
                shown: Any = render(_collect(_find(directory, job)))
            except agents.Failure as problem:  # agents come and go
                shown = Text(f"{problem.message}; waiting", style="yellow")
            hint = Text(f"every {interval:g} s, Ctrl-C ends", style="dim")
            live.update(Group(shown, Text(), hint), refresh=True)
            time.sleep(interval)


@click.command("top")
@click.option("--once", is_flag=True, help="Print the table once and end.")
@click.option(
    "--interval",
    type=Number(min=0.1, max=3600),
    default=1.0,
    show_default=True,
    help="Seconds between updates.",
)
@agents.common_options
def command(
    once: bool, interval: float, job: str | None, run_dir: str | None, as_json: bool
) -> None:
    """Shows each rank's step, newest committed step, stall and alarms, until Ctrl-C.

    \b
    stall      time that the last snapshot cost the training thread; if state
               is on a device, time that the device waited for copies at the
               gate (not at the program point)
    copied     bytes copied into the vault so far
    copied in  when they were copied: gaps (the rank waited for others), work,
               collectives (one was in flight), gate (training waited for the
               copy), program point (before an optimizer step returned)
    costs      slowdown of the mean step by snapshots (median rank), measured
               against control steps without a copy (docs/placement.md)
    drop/skip  snapshots given up (most often because tensors were written
               before their copy), and snapshots not begun (no free slot, an
               optimizer step captured into a graph, an error of the device)
    state      protected, starting, UNPROTECTED (training runs, but nothing is
               committed), gone, ended (cleanly)

    --json prints {"agents": [status, ...]} once. Without a terminal, the output is that of --once.
    Exit code 1 with --once or --json if a rank is unprotected or gone.
    """
    directory = agents.run_dir(run_dir)
    if not once and not as_json and sys.stdout.isatty():  # nobody would see it change
        try:
            _live(directory, job, interval, words.console())
        except KeyboardInterrupt:
            pass
        return
    statuses = _collect(_find(directory, job))
    if as_json:
        agents.print_json({"agents": statuses})
    else:
        words.console().print(render(statuses))
    ranks = [_stats(rank) for status in statuses for rank in status.get("ranks", [])]
    if any(
        not rank.get("said_bye") and (rank.get("unprotected") or not rank.get("alive", True))
        for rank in ranks
    ):
        raise SystemExit(agents.EXIT_WRONG)
