"""`reft stack`: where every rank of a job stands."""

from __future__ import annotations

import click

from reft import _agent_protocol as protocol
from reft._cli import agents


@click.command("stack")
@click.option(
    "--rank", "ranks", type=click.IntRange(min=0), multiple=True, metavar="N", help="Only this rank; may be repeated."
)
@agents.common_options
def command(ranks: tuple[int, ...], job: str | None, run_dir: str | None, as_json: bool) -> None:
    """Prints open collectives and the Python stacks of all threads of every rank, and who waits for whom.

    Works on running and on hanging jobs; nothing is stopped. --json prints {"agents": [report, ...]}.
    """
    wanted = {"ranks": list(ranks)} if ranks else {}
    reports = []
    for agent in agents.select(agents.run_dir(run_dir), job):
        report, _ = agent.ask(protocol.STACKS_REQUEST, wanted)
        reports.append(report)
    if as_json:
        agents.print_json({"agents": reports})
    else:
        click.echo("\n\n".join(str(report.get("text", "")).rstrip("\n") for report in reports))
    if ranks and not any(report.get("ranks") for report in reports):
        raise agents.Failure("no such rank here: " + " ".join(map(str, ranks)), agents.EXIT_NOTHING)
