"""`reft report`: where the time of the newest steps went, and the copies in it."""

from __future__ import annotations

import json
import statistics
from typing import Any

import click
from rich.table import Table
from rich.text import Text

from reft._cli import agents, native, timeline, timeline_page, vaults, words

_HEADINGS = (
    "rank",
    "step",
    "waiting",
    "capture",
    "gate",
    "in gaps",
    "compute",
    "comm.",
    "stalling",
    "snapshot",
)


def _read(found: list[vaults.Vault]) -> tuple[str, list[timeline.Rank], list[str]]:
    native.need()

    from reft import _C

    problems: list[str] = []
    jobs: dict[str, dict[int, timeline.Rank]] = {}
    for vault in found:
        try:
            with vault.open() as fd:
                read = _C.timeline_of(fd)
        except (_C.Error, OSError, ValueError) as error:
            problems.append(f"{vault.name}: {error}")
            continue
        except agents.Failure as error:
            problems.append(error.message)
            continue
        ranks = jobs.setdefault(str(read["job"]), {})
        rank = timeline.of_vault(read)
        if rank.rank in ranks:
            problems.append(f"{vault.name}: ignored, a second vault of rank {rank.rank}")
        else:
            ranks[rank.rank] = rank
    if len(jobs) > 1:
        raise agents.Failure(
            f"vaults of several jobs, choose one with --job: {', '.join(sorted(jobs))}",
            agents.EXIT_WRONG,
        )
    for job, ranks in jobs.items():
        return job, [ranks[number] for number in sorted(ranks)], problems
    return "", [], problems


def summary(rank: timeline.Rank) -> dict[str, Any]:
    """Medians over the steps, and sums of bytes."""
    middle = statistics.median
    copied = {tier: sum(step.copied[tier] for step in rank.steps) for tier in timeline.TIERS}
    return {
        "rank": rank.rank,
        "steps": len(rank.steps),
        "step_ns": middle(step.end - step.begin for step in rank.steps),
        "gap_share": sum(step.gap_ns for step in rank.steps)
        / sum(step.end - step.begin for step in rank.steps),
        "capture_ns": middle(step.capture_ns for step in rank.steps),
        "gate_ns": middle(step.gate_ns for step in rank.steps),
        "copied_bytes": {tier.replace(" ", "_"): count for tier, count in copied.items()},
        **rank.cost,
    }


def sentence(ranks: list[timeline.Rank]) -> str:
    """The summary of all ranks, in one or two sentences."""
    steps = [step for rank in ranks for step in rank.steps]
    total = sum(sum(step.copied.values()) for step in steps)
    captured = sum(step.capture_ns for step in steps)
    gated = sum(step.gate_ns for step in steps)
    devices = all(rank.device for rank in ranks)
    stalled = (
        gated if devices else captured + gated
    )  # a host that is ahead of its device takes nothing from it
    waited = (
        f"training waited {words.nanoseconds(stalled / len(steps))} per step for reft on average"
    )
    share = f"{100 * stalled / sum(step.end - step.begin for step in steps):.1f} %"
    if devices:
        waited = (
            f"the device waited {words.nanoseconds(gated / len(steps))} per step for copies at the"
            " gate on average"
        )
        share += f"; the host, ahead of its device, spent {words.nanoseconds(captured / len(steps))} at the program point"
    known = sorted(
        (rank for rank in ranks if rank.cost), key=lambda rank: rank.cost["overhead_ppm"]
    )
    cost = f" Over the run: {words.overhead(known[len(known) // 2].cost)}." if known else ""
    if not total:
        return f"Nothing was copied; {waited} ({share}).{cost}"
    in_gaps = 100 * sum(step.copied["gap"] for step in steps) / total
    who = "device" if devices else "host"
    return f"{in_gaps:.0f} % of the bytes were copied while the {who} waited for others anyway; {waited} ({share}).{cost}"


def _row(rank: timeline.Rank) -> list[str]:
    facts = summary(rank)
    copied: dict[str, int] = facts["copied_bytes"]
    total = sum(copied.values())

    def share(count: int) -> str:
        return f"{100 * count / total:.0f} %" if total else "-"

    return [
        str(rank.rank),
        words.nanoseconds(facts["step_ns"]),
        f"{100 * facts['gap_share']:.0f} %",
        words.nanoseconds(facts["capture_ns"]),
        words.nanoseconds(facts["gate_ns"]),
        share(copied["gap"]),
        share(copied["compute"]),
        share(copied["communication"]),
        share(copied["at_once"] + copied["gate"]),
        words.size(total / len(rank.steps)),
    ]


@click.command("report")
@click.option(
    "--steps",
    type=click.IntRange(min=1),
    default=6,
    show_default=True,
    metavar="N",
    help="Number of newest steps to show.",
)
@click.option("--html", "page", metavar="FILE", help="Draw the steps as one page.")
@click.option(
    "--trace", metavar="FILE", help="Write a trace for ui.perfetto.dev or chrome://tracing."
)
@click.option(
    "--vault-dir", metavar="DIR", help="Read the vault files there instead of asking agents."
)
@agents.common_options
def command(
    steps: int,
    page: str | None,
    trace: str | None,
    vault_dir: str | None,
    job: str | None,
    run_dir: str | None,
    as_json: bool,
) -> None:
    """Shows where the time of a job's newest steps went: computing, waiting, and what reft copied
    meanwhile.

    \b
    waiting    share of the step in which the host waits for other ranks: the
               gaps (on a device, waits for large collectives count too)
    capture    time that a snapshot adds to the optimizer step when it begins.
               In a control step (one in 64), this is the whole copy
    gate       time that the next optimizer step waits for the copy

    Times are medians over the steps; shares and bytes cover all of them.

    \b
    If state is on a CUDA device, the clock of the device gives all times
    except `capture`:
    capture    time of the host, which runs ahead of the device
    gate       contains the whole copy in a control step (one in 512), but not
               the waits at the program point (as under `sync`)

    \b
    in gaps, compute, comm., stalling
               when the bytes were copied: in gaps, during compute, during
               communication, or while training waited for the copy
    snapshot   bytes that the rank copies per step

    Reads the vaults of the ranks of this machine. A job that ended cleanly leaves no vaults.
    --json prints {"job", "ranks": [{"rank", "summary", "steps": [...]}], "problems"}. Exit code 1
    if a vault cannot be read or a rank is not shown, 3 if no rank has completed two steps.
    """
    name, all_ranks, problems = _read(vaults.find(vault_dir, job, run_dir))
    begin, end, ranks = timeline.newest(all_ranks, steps)
    shown = {rank.rank for rank in ranks}
    problems += [
        f"rank {rank.rank} is not shown: it has no step in the time range of the other ranks"
        for rank in all_ranks
        if rank.rank not in shown and rank.steps
    ]
    if not ranks and not problems:
        raise agents.Failure("no rank has completed two steps yet", agents.EXIT_NOTHING)
    if ranks:
        if page is not None:
            table = _HEADINGS, [_row(rank) for rank in ranks]
            agents.write_file(
                page, timeline_page.page(name, sentence(ranks), (begin, end), ranks, table)
            )
        if trace is not None:
            agents.write_file(trace, json.dumps(timeline.trace(ranks, name)))
    if as_json:
        described = [
            {
                "rank": rank.rank,
                "summary": summary(rank),
                "steps": [step.as_json() for step in rank.steps],
            }
            for rank in ranks
        ]
        agents.print_json({"job": name, "ranks": described, "problems": problems})
    else:
        _print(name, ranks)
        for problem in problems:
            words.echo(f"reft: {problem}", err=True)
    if problems:
        raise SystemExit(agents.EXIT_WRONG)


def _print(name: str, ranks: list[timeline.Rank]) -> None:
    if not ranks:
        return
    console = words.console()
    count = max(len(rank.steps) for rank in ranks)
    console.print(
        Text(f"job {name}: the newest {count} step{'s' if count != 1 else ''}", style="bold"),
        soft_wrap=True,
    )
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim")
    for heading in _HEADINGS:
        table.add_column(heading, justify="right", no_wrap=True)
    for rank in ranks:
        table.add_row(*_row(rank))
    console.print(table)
    console.print(sentence(ranks), soft_wrap=True)
