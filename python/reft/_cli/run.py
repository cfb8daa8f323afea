"""`reft run`: torchrun with restarts switched on."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

import click

from reft._cli import agents, words
from reft._cli.preload import with_library

_RESTARTS = 3


def torchrun_arguments(arguments: Sequence[str]) -> tuple[list[str], Path | None]:
    """Adds what reft needs.

    Returns:
        Arguments for torch.distributed.run, and the script if it is a file.

    Raises:
        SystemExit: torchrun does not understand the arguments (it has printed why).
    """
    from torch.distributed.run import get_args_parser

    parser = get_args_parser()
    parser.prog = "reft run"
    parser.set_defaults(max_restarts=None)
    known = parser.parse_args(list(arguments))
    result = list(arguments)
    if known.max_restarts is None and "PET_MAX_RESTARTS" not in os.environ:
        result = ["--max-restarts", str(_RESTARTS), *result]
    script = None if known.module or known.no_python else Path(known.training_script)
    return result, script


@click.command(
    "run",
    context_settings={
        "ignore_unknown_options": True,
        "allow_interspersed_args": False,
        "help_option_names": ["-h", "--help"],
    },
)
@click.option(
    "--check", is_flag=True, help="First check this node; do not start if it is at fault."
)
@click.option(
    "--preload", is_flag=True, help="Observe what the ranks do in CUDA's driver (LD_PRELOAD)."
)
@click.option("--dry-run", is_flag=True, help="Print the command, do not run it.")
@click.option("--json", "as_json", is_flag=True, help="Print the command as JSON, do not run it.")
@click.argument(
    "arguments",
    nargs=-1,
    required=True,
    type=click.UNPROCESSED,
    metavar="[TORCHRUN OPTIONS] SCRIPT [ARGS]...",
)
def command(
    check: bool, preload: bool, dry_run: bool, as_json: bool, arguments: tuple[str, ...]
) -> None:
    """Runs SCRIPT under torchrun, which restarts the ranks when one dies (--max-restarts 3 unless
    given).

    The script resumes by itself if it calls init_process_group(backend="reft"). Options before
    SCRIPT go to torchrun; the word torchrun itself may precede them. The exit code is that of
    torchrun.

    --check measures this node first (`reft check --quick`, docs/check.md). If it is at fault, this
    prints why and ends with exit code 3: the node does not join the others.

    --preload puts libreft_preload.so into LD_PRELOAD of torchrun and of all that it starts
    (docs/intercept.md).
    """
    if Path(arguments[0]).name == "torchrun" and len(arguments) > 1:
        arguments = arguments[1:]
    rest, script = torchrun_arguments(arguments)
    argv = [sys.executable, "-m", "torch.distributed.run", *rest]
    added = {"LD_PRELOAD": with_library(os.environ)} if preload else {}
    if as_json:
        agents.print_json({"argv": argv, **({"environment": added} if added else {})})
        return
    if dry_run:
        settings = [f"{name}={value}" for name, value in added.items()]
        words.echo(shlex.join([*(["env", *settings] if settings else []), *argv]))
        return
    if script is not None and not script.is_file():
        raise agents.Failure(f"script not found: {script}", agents.EXIT_NOTHING)
    if os.environ.get("REFT_DISABLE") == "1":
        words.echo("reft: REFT_DISABLE=1 is set: this run has no snapshots", err=True)
    elif script is not None and "reft" not in script.read_text(errors="replace"):
        words.echo(
            f'reft: {script} does not contain "reft": is backend="reft" set elsewhere?', err=True
        )
    if check:
        from reft._cli.check import preflight

        preflight()
    sys.stdout.flush()
    os.execve(argv[0], argv, os.environ | added)
