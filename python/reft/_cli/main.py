"""Entry point of the command `reft`.

Commands import what they need themselves, so that `reft stack` does not wait for torch.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence

import click

import reft

_COMMANDS = {
    "check": "Find nodes, network cards and links that are slow or broken.",
    "doctor": "Check this machine and its settings.",
    "drill": "Check whether a job resumes exactly, by killing a rank.",
    "gc": "List or remove vault files of jobs that have ended.",
    "ls": "List vaults and the snapshots in them.",
    "plan": "Compare what protections would cost a job and survive.",
    "replay": "Recompute a hang verdict from a saved report.",
    "report": "Show where the newest steps and their copies spent time.",
    "run": "Run a script under torchrun, with restarts switched on.",
    "simulate": "Estimate what snapshots would cost a hypothetical job.",
    "stack": "Show where every rank is: open collectives and stacks.",
    "top": "Watch steps, snapshots and alarms of running jobs.",
    "verify": "Verify the checksums of every sealed snapshot.",
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
    """Keeps PyTorch training alive. These commands start and inspect jobs on this machine.

    \b
    Exit codes of all commands:
      0  done, nothing wrong
      1  the command found something wrong
      2  wrong usage
      3  nothing found to inspect; check, run --check: this node is to be excluded
      4  an agent did not answer
    """


def main(arguments: Sequence[str] | None = None) -> None:
    cli.main(args=None if arguments is None else list(arguments), prog_name="reft")


if __name__ == "__main__":
    main()
