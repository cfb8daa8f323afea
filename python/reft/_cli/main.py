"""Entry point of the command `reft`.

Commands import what they need themselves, so that `reft stack` does not wait for torch.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence

import click

import reft

_COMMANDS = {
    "doctor": "Check this machine and environment, say what to do.",
    "ls": "List vaults and the snapshots in them.",
    "replay": "Decide a written hang verdict anew from its evidence.",
    "report": "Where the time of the newest steps went, and the copies.",
    "run": "torchrun, with restarts switched on.",
    "simulate": "What snapshots would cost a job that is only described.",
    "stack": "Where every rank stands: open collectives and stacks.",
    "top": "Steps, snapshots and alarms of running jobs, live.",
    "verify": "Hash every sealed snapshot again.",
}


class _Lazy(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        command = importlib.import_module(f"reft._cli.{cmd_name}").command
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(_COMMANDS.items()))


@click.command(cls=_Lazy, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(reft.__version__, prog_name="reft", message="%(prog)s %(version)s")
def cli() -> None:
    """Keeps PyTorch training alive: looks at the jobs that run here.

    \b
    Exit codes of all commands:
      0  done, nothing wrong
      1  something is wrong with what was looked at
      2  wrong usage
      3  nothing was found to look at
      4  an agent was found but did not answer
    """


def main(arguments: Sequence[str] | None = None) -> None:
    cli.main(args=None if arguments is None else list(arguments), prog_name="reft")


if __name__ == "__main__":
    main()
