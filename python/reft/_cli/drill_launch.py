"""Parses the command that launches a job: torchrun, in all the ways to call it.

Nothing is run here. Errors: `NotUnderstood`, with one sentence for the user.
"""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

_MODULES = ("torch.distributed.run", "torch.distributed.launch")
_EXAMPLE = "reft drill -- torchrun --nproc-per-node=2 train.py"


class NotUnderstood(Exception):
    """A drill cannot run this command."""


@dataclass(frozen=True)
class Launch:
    """A torchrun command.

    Attributes:
        program: what starts torchrun.
        options: torchrun's own.
        script: the script with its arguments.
        restarts: how often it restarts the ranks.
        has_log_dir: whether the command says where torchrun's logs go.
    """

    program: tuple[str, ...]
    options: tuple[str, ...]
    script: tuple[str, ...]
    restarts: int
    has_log_dir: bool

    def argv(self, restarts: int, log_dir: Path) -> list[str]:
        """The command to run, with at least this many restarts; its logs do not stay behind."""
        added = [] if restarts <= self.restarts else [f"--max-restarts={restarts}"]
        added += [] if self.has_log_dir else [f"--log-dir={log_dir}"]
        options = list(self.options)
        end = options.pop() if options[-1:] == ["--"] else None
        return [*self.program, *options, *added, *([] if end is None else [end]), *self.script]


def understand(command: Sequence[str]) -> Launch:
    """Reads a command as its words.

    Raises:
        NotUnderstood: it does not call torchrun, uses more than this node, or starts something
            that does not exist.
    """
    program, arguments = _split(list(command))
    if shutil.which(program[0]) is None:
        raise NotUnderstood(f"command not found: {program[0]}")
    known = _parsed(arguments)
    most = str(known.nnodes).rpartition(":")[2]
    if most != "1":
        raise NotUnderstood(
            f"a drill runs on one node, and --nnodes={known.nnodes} asks for more: leave it out"
        )
    script = Path(known.training_script)
    if not (known.module or known.no_python) and not script.is_file():
        raise NotUnderstood(f"script not found: {script}")
    at = len(arguments) - len(known.training_script_args) - 1
    while at > 0 and arguments[at] != known.training_script:
        at -= 1
    return Launch(
        tuple(program),
        tuple(arguments[:at]),
        tuple(arguments[at:]),
        int(known.max_restarts),
        known.log_dir is not None,
    )


def _split(command: list[str]) -> tuple[list[str], list[str]]:
    """What starts torchrun, and torchrun's arguments."""
    name = Path(command[0]).name
    if name == "torchrun":
        return command[:1], command[1:]
    if name == "reft" and command[1:2] == ["run"]:
        return [sys.executable, "-m", _MODULES[0]], command[2:]
    if name.startswith("python") and "-m" in command:
        at = command.index("-m") + 1
        if command[at : at + 1] and command[at] in _MODULES:
            return command[: at + 1], command[at + 1 :]
    words = shlex.join(command)
    shown = words if len(words) <= 60 else f"{words[:59]}…"
    raise NotUnderstood(
        f"`{shown}` does not start torchrun, which a drill needs to restart killed ranks:"
        f" {_EXAMPLE}"
    )


def _parsed(arguments: list[str]) -> Any:
    from torch.distributed.run import get_args_parser

    parser = get_args_parser()

    def fail(message: str) -> NoReturn:
        raise NotUnderstood(f"torchrun does not understand its options: {message}")

    parser.error = fail
    return parser.parse_args(arguments)
