"""`reft stack`: the stacks of every rank of a job, or of any Python process."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import click

from reft._cli import agents, native_frames, words
from reft._link import agent_protocol as protocol
from reft._link import other_process

_STATES = {
    "R": "running",
    "S": "sleeping",
    "D": "in the kernel",
    "T": "stopped",
    "t": "stopped by a debugger",
    "Z": "ended",
}


@click.command("stack")
@click.option(
    "--rank",
    "ranks",
    type=click.IntRange(min=0),
    multiple=True,
    metavar="N",
    help="Only this rank; may be repeated.",
)
@click.option(
    "--pid",
    type=click.IntRange(min=1),
    metavar="PID",
    help="Instead of a job: any CPython 3.11 to 3.13 process, with or without reft, even stopped.",
)
@click.option(
    "--native",
    is_flag=True,
    help="Add native frames, also of threads that run no Python. Stops each thread for a moment.",
)
@agents.common_options
def command(
    ranks: tuple[int, ...],
    pid: int | None,
    native: bool,
    job: str | None,
    run_dir: str | None,
    as_json: bool,
) -> None:
    """Prints open collectives, the Python stacks of all threads of every rank, and which rank waits
    for which.

    Works on running and on hanging jobs. Only --native stops threads, one at a time, usually for
    less than a millisecond.
    --json prints {"agents": [report, ...]}.
    """
    if pid is not None:
        if ranks or job:
            raise click.UsageError("--pid is about one process, --rank and --job are about a job")
        _process(pid, native, as_json)
        return
    wanted = {"ranks": list(ranks)} if ranks else {}
    reports = []
    complete = True
    for agent in agents.select(agents.run_dir(run_dir), job):
        report, _ = agent.ask(protocol.STACKS_REQUEST, wanted)
        if native:
            complete = native_frames.add_to(report, agent) and complete
        reports.append(report)
    if ranks and not any(report.get("ranks") for report in reports):
        raise agents.Failure("no such rank here: " + " ".join(map(str, ranks)), agents.EXIT_NOTHING)
    if as_json:
        agents.print_json({"agents": reports})
    else:
        texts = []
        for report in reports:
            lines = [
                str(report.get("text", "")).rstrip("\n"),
                *(native_frames.lines_of_ranks(report) if native else []),
            ]
            texts.append("\n".join(lines))
        words.echo("\n\n".join(texts))
    if not complete:
        click.get_current_context().exit(agents.EXIT_WRONG)


def _process(pid: int, native: bool, as_json: bool) -> None:
    if not Path(f"/proc/{pid}").exists():
        raise agents.Failure(f"there is no process {pid}", agents.EXIT_NOTHING)
    try:
        read = other_process.read_stacks(pid, native)
    except subprocess.TimeoutExpired as error:
        raise agents.Failure(
            f"the memory of process {pid} cannot be read within {error.timeout:g} s",
            agents.EXIT_WRONG,
        ) from None
    except (OSError, ValueError) as error:
        raise agents.Failure(f"cannot run reft-agent: {error}", agents.EXIT_WRONG) from error
    state = next((thread["state"] for thread in read["native_threads"] if thread["tid"] == pid), "")
    found: dict[str, Any] = {**read, "command": _command_of(pid), "state": state}
    # Both say the same where there is no right to read it.
    errors = dict.fromkeys(filter(None, [read["error"], read["native"]["error"] if native else ""]))
    if as_json:
        agents.print_json(found)
    else:
        words.echo("\n".join(_lines_of(found)))
        for problem in errors:
            words.echo(f"reft: {problem}", err=True)
    if errors:
        click.get_current_context().exit(agents.EXIT_WRONG)


def _command_of(pid: int) -> str:
    try:
        parts = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return ""
    return b" ".join(parts).decode(errors="replace").strip()[:1000]


def _lines_of(found: dict[str, Any]) -> list[str]:
    version = f", CPython {found['python']}" if found["python"] else ""
    lines = [f"process {found['pid']}: {_STATES.get(found['state'], 'state unknown')}{version}"]
    if found["command"]:
        lines.append("  " + found["command"])
    if found.get("native", {}).get("threads"):
        lines += ["", native_frames.LEGEND]
        for thread in found["native"]["threads"]:
            lines += ["", *native_frames.lines_of_thread(thread)]
        return lines
    for thread in found["threads"]:
        kind = "main thread" if thread["main"] else "thread"
        heading = " ".join(filter(None, [kind, thread["thread"], thread["name"]]))
        lines += ["", f"{heading}{native_frames.gil_of(thread)}, newest call first"]
        for frame in thread["frames"]:
            lines.append(f"  {frame['file']}:{frame['line'] or '?'} {frame['function']}")
        if not thread["frames"]:
            lines.append("  (no Python frames)")
        elif thread["truncated"]:
            lines.append("  ...")
    count = len(found["native_threads"])
    lines += ["", f"{count} thread{'s' if count != 1 else ''} in all, as the kernel sees them:"]
    lines += [
        f"  {thread['tid']} {thread['state']} {thread['name']}"
        for thread in found["native_threads"]
    ]
    return lines
