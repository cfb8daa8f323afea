"""`reft check`: whether nodes, network cards and links can carry a job, and which cannot."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import tempfile
import textwrap
import time
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.text import Text

from reft import _voice
from reft._check import evidence
from reft._check.evidence import LINK, NIC, NODE, Fault, Unit
from reft._cli import agents, words
from reft._cli.options import Number

if TYPE_CHECKING:
    from reft._check.node import Options, Outcome

EXIT_EXCLUDED = 3
_MOST_LINES = 22
_DRAIN_SEC = 30
_ADDRESS = re.compile(r"(.+):(\d{1,5})")


@click.command("check")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of text.")
@click.option(
    "--quick", is_flag=True, help="Measure less: seconds; at most 3 or 4 rounds at first."
)
@click.option(
    "--nodes",
    type=click.IntRange(1, evidence.MOST_NODES),
    help="Number of nodes. Default: torchrun's, else 1.",
)
@click.option(
    "--node-rank", type=click.IntRange(0), help="Number of this node. Default: torchrun's."
)
@click.option(
    "--store", metavar="HOST:PORT", help="Where node 0 has the nodes meet. Default: torchrun's."
)
@click.option(
    "--nic", "cards", multiple=True, metavar="NAME",
    help="Network device, or address, to measure; several for several rails. Default: the one that"
    " reaches the store.",
)  # fmt: skip
@click.option(
    "--wait",
    "wait_sec",
    type=Number(1, 86400),
    default=120.0,
    show_default=True,
    help="Seconds that node 0 waits for the others.",
)
def command(
    as_json: bool,
    quick: bool,
    nodes: int | None,
    node_rank: int | None,
    store: str | None,
    cards: tuple[str, ...],
    wait_sec: float,
) -> None:
    """Measures this node, or with --nodes also the links between nodes, and names what is at fault.

    \b
    reft check                                              this node
    torchrun --nnodes=4 --nproc-per-node=1 ... -m reft check   4 nodes
    reft check --nodes 4 --node-rank R --store HOST:PORT    4 nodes, without torchrun

    Run it while nothing else runs on the nodes. What is measured, and how it decides, is in
    docs/check.md.

    \b
    Exit codes:
      0  nothing is at fault
      1  something is, and not this node; or the evidence leaves open what it is
      2  wrong usage
      3  this node is to be excluded
      4  the store, or node 0, did not answer
    """
    from reft._check.meeting import Gone
    from reft._check.node import Unusable, alone, together

    began = time.monotonic()
    place = _place(nodes, node_rank, store)
    if place is None:
        return  # one process of a node is enough
    node, count, at, hosts_store = place
    drain = setting("check_drain")
    try:
        options = _options(node, count, cards, quick, wait_sec, at)
        if count == 1:
            outcome = alone(options)
        else:
            outcome = together(options, _connect(at, hosts_store, wait_sec))
    except Unusable as problem:
        raise agents.Failure(str(problem), 2) from problem
    except Gone as problem:
        raise agents.Failure(f"node {node}: {problem}", agents.EXIT_NO_ANSWER) from problem
    conclude(options, outcome, time.monotonic() - began, as_json, drain)


def conclude(options: Options, outcome: Outcome, seconds: float, as_json: bool, drain: str) -> None:
    """Prints the outcome, drains this node if that is wanted, and ends with the exit code."""
    commands = {node: drain_command(outcome, node) for node in outcome.verdict.exclude}
    known = {node: one for node, one in commands.items() if one}
    if as_json:
        agents.print_json(as_object(options, outcome, seconds, known))
    elif options.node == 0:
        for line in lines(options, outcome, seconds, known):
            words.console().print(Text(line), soft_wrap=True)
    elif options.node in outcome.verdict.exclude:
        words.echo(
            f"reft check: node {options.node} is to be excluded: {reason(outcome, options.node)}"
        )
    if drain == "run" and options.node in known:
        _run_drain(known[options.node])
    if options.node in outcome.verdict.exclude:
        raise SystemExit(EXIT_EXCLUDED)
    if not outcome.verdict.is_good:
        raise SystemExit(agents.EXIT_WRONG)


def preflight() -> None:
    """The check of this node alone, before it takes part in a job.

    Raises:
        SystemExit: it is not to take part; the reason is printed.
    """
    from reft._check.node import Options, alone

    drain = setting("check_drain")
    outcome = alone(Options(0, 1, (), measured_directory(), True, 0.0))
    verdict = outcome.verdict
    if verdict.is_good:
        words.echo(f"reft: check passed: {_measured(outcome)}", err=True)
        return
    for fault in verdict.faults:
        words.echo(f"reft: check: {outcome.own.host}: {fault.why}", err=True)
    words.echo("reft: this node does not start: it is at fault", err=True)
    one = drain_command(outcome, 0)
    if one:
        words.echo(f"reft: {shlex.join(one)}", err=True)
        if drain == "run":
            _run_drain(one)
    raise SystemExit(EXIT_EXCLUDED)


def setting(name: str) -> Any:
    """A setting of reft.

    Raises:
        Failure: one has a value that is not allowed.
    """
    import torch  # noqa: F401

    from reft import _C
    from reft._link import settings

    try:
        return settings.read()[name]
    except _C.InvalidArgument as error:
        raise agents.Failure(str(error), 2) from error


def measured_directory() -> Path:
    """Where the disk is measured: where vaults are, else where temporary files are."""
    given = os.environ.get("REFT_VAULT_DIR", "")
    return Path(given) if given and Path(given).is_dir() else Path(tempfile.gettempdir())


# -- where this node is


def _place(
    nodes: int | None, node: int | None, store: str | None
) -> tuple[int, int, tuple[str, int], bool] | None:
    """Number of this node, of nodes, the store's address, and whether this process has it; None for
    a process that has nothing to do."""
    env = os.environ
    if store is None and nodes is None and "GROUP_WORLD_SIZE" in env:
        if env.get("LOCAL_RANK", "0") != "0":
            return None
        node, nodes = int(env["GROUP_RANK"]), int(env["GROUP_WORLD_SIZE"])
        at = (env.get("MASTER_ADDR", "localhost"), int(env.get("MASTER_PORT", "29500")))
        return node, nodes, at, node == 0 and env.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    nodes = nodes or 1
    if nodes == 1:
        return 0, 1, ("localhost", 0), True
    if node is None or store is None:
        raise click.UsageError("--nodes needs --node-rank and --store, or start it with torchrun")
    if node >= nodes:
        raise click.UsageError(f"--node-rank {node}: the largest is {nodes - 1}")
    match = _ADDRESS.fullmatch(store)
    if not match or not 0 < int(match[2]) < 1 << 16:
        raise click.UsageError(f"--store {store}: not HOST:PORT")
    return node, nodes, (match[1].strip("[]"), int(match[2])), node == 0


def _options(
    node: int, nodes: int, cards: tuple[str, ...], quick: bool, wait_sec: float, at: tuple[str, int]
) -> Options:
    from reft._check.node import Options
    from reft._link import mesh, secret

    if nodes > 1 and not cards:
        os.environ["MASTER_ADDR"] = at[0]
        try:
            cards = (mesh.own_address(""),)
        except OSError as error:
            raise agents.Failure("this node's address is not known: give --nic", 2) from error
    if len(cards) > evidence.MOST_RAILS:
        raise click.UsageError(f"--nic: at most {evidence.MOST_RAILS}")
    key = None
    if path := os.environ.get(secret.FILE, ""):
        try:
            key = secret.given(Path(path))
        except OSError as error:
            raise agents.Failure(f"{secret.FILE}: {error}", 2) from error
    return Options(node, nodes, cards, measured_directory(), quick, wait_sec, key)


def _connect(at: tuple[str, int], hosts_store: bool, wait_sec: float) -> Any:
    import torch.distributed as dist

    host, port = at
    try:
        store = dist.TCPStore(
            host, port, None, hosts_store, timedelta(seconds=wait_sec), wait_for_workers=False
        )
    except Exception as error:
        text = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise agents.Failure(f"no store at {host}:{port}: {text}", agents.EXIT_NO_ANSWER) from error
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return dist.PrefixStore(f"reft/check/{attempt}", store)


# -- words


def unit_name(unit: Unit, rails: int) -> str:
    if unit.kind == NODE:
        return f"node {unit.node}"
    rail = f" rail {unit.rail}" if rails > 1 else ""
    if unit.kind == NIC:
        return f"card of node {unit.node}{rail}"
    return f"link {unit.node}-{unit.peer}{rail}"


def lines(
    options: Options, outcome: Outcome, seconds: float, drain: dict[int, list[str]]
) -> list[str]:
    """At most 22 lines of at most 80 characters, but for commands to copy."""
    verdict, rails = outcome.verdict, len(options.cards)
    head = f"reft check: {_voice.plural(options.nodes, 'node')}"
    if options.nodes > 1:
        head += (
            f", {_voice.plural(rails, 'rail')}, {_voice.plural(outcome.rounds, 'round')} of pairs"
        )
    found = [f"{head}, {seconds:.0f} s"]
    if options.nodes == 1:
        found += [_folded(f"  {_part(part)}", "    ")[0] for part in outcome.own.parts]
    faulty = {fault.unit.node for fault in verdict.faults if fault.unit.kind != LINK}
    every = options.nodes <= 8
    for node in range(options.nodes):
        mine = [f for f in verdict.faults if f.unit.kind != LINK and f.unit.node == node]
        host = outcome.hosts.get(node, "-")
        for fault in mine:
            rail = f"rail {fault.unit.rail} " if rails > 1 else ""
            what = f"{f'card {rail}' if fault.unit.kind == NIC else ''}{fault.how}"
            found += _folded(f"node {node:<4} {host:16.16} {what.upper()}: {fault.why}", " " * 11)
        if every and not mine:
            state = "at fault, or cut off" if node in verdict.exclude else "ok"
            found.append(f"node {node:<4} {host:16.16} {state}")
    if not every:
        found.append(f"{options.nodes - len(faulty)} other nodes: ok")
    for fault in verdict.faults:
        if fault.unit.kind == LINK:
            text = f"{unit_name(fault.unit, rails)}: {fault.how.upper()}: {fault.why}"
            found += _folded(text, "  ")
    for question in verdict.between:
        choices = [" and ".join(unit_name(f.unit, rails) for f in one) for one in question]
        shown, more = choices[:4], len(choices) - 4
        text = (
            "undecidable between: "
            + ", or ".join(shown)
            + (f", or {more} more" if more > 0 else "")
        )
        found += _folded(text, "  ")
        found += _folded(f"  {question[0][0].why}", "  ") if question[0] else []
    for note in verdict.notes:
        found += _folded(f"note: {note}", "  ")
    if verdict.untested:
        found.append(f"note: {_voice.plural(verdict.untested, 'link')} not measured")
    ends = todo(options, outcome, drain)
    room = _MOST_LINES - len(ends)
    if len(found) > room:
        found = [*found[: room - 1], f"... {len(found) - room + 1} more lines; --json has all"]
    return found + ends


def todo(options: Options, outcome: Outcome, drain: dict[int, list[str]]) -> list[str]:
    verdict = outcome.verdict
    if verdict.is_good:
        return [
            "-> nothing is at fault"
            + (", as far as this node can tell" if options.nodes == 1 else "")
        ]
    found = []
    if verdict.exclude:
        listed = ", ".join(f"{n} ({outcome.hosts.get(n, 'unknown')})" for n in verdict.exclude[:6])
        more = f" and {len(verdict.exclude) - 6} more" if len(verdict.exclude) > 6 else ""
        found += _folded(f"-> start without node {listed}{more}", "   ")
    if any(fault.unit.kind == NIC for fault in verdict.faults):
        found.append("-> look at the card, its port and its cable")
    if any(fault.unit.kind == LINK for fault in verdict.faults):
        found.append(
            "-> a link is at fault, not its nodes: look at routes and switches between them"
        )
    if verdict.between and not verdict.exclude:
        found.append("-> no node is excluded; more nodes would decide it")
    found += [f"   {shlex.join(one)}" for one in list(drain.values())[:4]]
    return found


def as_object(
    options: Options, outcome: Outcome, seconds: float, drain: dict[int, list[str]]
) -> dict[str, Any]:
    verdict = outcome.verdict
    result = "ok" if verdict.is_good else "undecided" if verdict.between else "fault"
    return {
        "result": result,
        "node": options.node,
        "nodes": options.nodes,
        "rails": len(options.cards),
        "excluded": options.node in verdict.exclude,
        **evidence.dump_verdict(verdict),
        "hosts": {str(node): host for node, host in sorted(outcome.hosts.items())},
        "parts": [asdict(part) for part in outcome.own.parts],
        "ports": [asdict(port) for port in outcome.own.ports],
        "rounds": outcome.rounds,
        "seconds": round(seconds, 3),
        "drain": [shlex.join(one) for one in drain.values()],
    }


def _part(part: evidence.Part) -> str:
    if part.fault:
        return f"{part.name:24} FAULT: {part.fault}"
    if part.skipped:
        return f"{part.name:24} not measured: {part.skipped}"
    return f"{part.name:24} {part.value:.3g} {part.unit}"


def _measured(outcome: Outcome) -> str:
    parts = [part for part in outcome.own.parts if not part.skipped]
    return ", ".join(f"{part.name} {part.value:.3g} {part.unit}" for part in parts[:4])


def _folded(text: str, indent: str) -> list[str]:
    """Lines of at most 80 characters; the first three."""
    return textwrap.wrap(text, 80, subsequent_indent=indent)[:3]


def reason(outcome: Outcome, node: int) -> str:
    """Why a node is excluded."""
    mine = [f for f in outcome.verdict.faults if f.unit.kind != LINK and f.unit.node == node]
    if not mine:
        return "its card is at fault, or all of its links"
    return "; ".join(_reason(fault) for fault in mine)


def _reason(fault: Fault) -> str:
    return f"{'card ' if fault.unit.kind == NIC else ''}{fault.how}: {fault.why}"


# -- Slurm


def drain_command(outcome: Outcome, node: int) -> list[str]:
    """The command that has Slurm drain a node; [] without Slurm, or for a node without a name."""
    host = outcome.hosts.get(node)
    if "SLURM_JOB_ID" not in os.environ or host is None:
        return []
    why = re.sub(r"[^A-Za-z0-9 .,:;%/_-]", "", reason(outcome, node))[:120]
    return ["scontrol", "update", f"nodename={host}", "state=drain", f"reason=reft check: {why}"]


def _run_drain(command: list[str]) -> None:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_DRAIN_SEC, check=False,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        words.echo(f"reft: {shlex.join(command)}: {error}", err=True)
        return
    if done.returncode:
        words.echo(f"reft: {shlex.join(command)}: {done.stderr.strip()[:400]}", err=True)
