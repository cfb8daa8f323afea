"""`reft drill`: whether a script resumes exactly, by killing it.

Parses the command and runs the jobs; `drill_verdict` decides, `drill_words` prints the result.

Threads: the main thread. Errors: `agents.Failure` if the drill cannot run.
"""

from __future__ import annotations

import dataclasses
import json
import os
import random
import re
import secrets
import shlex
import shutil
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import click
from rich.text import Text

from reft import _voice
from reft._cli import (
    agents,
    drill_job,
    drill_launch,
    drill_verdict,
    drill_words,
    options,
    words,
)
from reft._cli.drill_verdict import Run, Verdict
from reft._link.protection import AUTO, is_copied

EXIT_NOT_RUN = 2

_TIMED = 8  # steps after the recorded ones that are only timed
_FIRST_KILL = 3  # two snapshots may be committed by then
_AFTER = 2  # steps after the last kill, at least
_TAIL = 15  # lines of a failed run
_LONGEST_FOLDER = 60  # so that the path of a socket has room below it
_MESSAGE = re.compile(r"^reft: (.*(?:not restor|not resumed|NOT protected|no step can be).*)$")
_FAILED = re.compile(r"^E\d{4} .*failed \(exitcode: ")
_LAUNCHER = re.compile(r"^[EWI]\d{4} ")


class _Stopped(BaseException):
    """A signal asked this command to end."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.code = 128 + number


@dataclasses.dataclass(frozen=True)
class _Settings:
    """The options of the command."""

    steps: int | None
    kill: tuple[tuple[int, int], ...]
    kills: int
    seed: int
    timeout_sec: float
    verbose: bool


def _parse_kills(
    ctx: click.Context, param: click.Parameter, values: tuple[str, ...]
) -> tuple[tuple[int, int], ...]:
    kills = []
    for value in values:
        found = re.fullmatch(r"(\d{1,6}):(\d{1,9})", value)
        if not found or int(found[2]) < _FIRST_KILL:
            raise click.BadParameter(
                f"{value!r} is not RANK:STEP, such as 1:6, with a step from {_FIRST_KILL} on",
                ctx,
                param,
            )
        kills.append((int(found[1]), int(found[2])))
    return tuple(kills)


@click.command(
    "drill",
    context_settings={
        "ignore_unknown_options": False,
        "allow_interspersed_args": False,
        "help_option_names": ["-h", "--help"],
    },
)
@click.option(
    "--steps", type=click.IntRange(4, 100_000), metavar="N",
    help="Steps to compare. Default: 10, or more if the kills need more.",
)  # fmt: skip
@click.option(
    "--kill", "kill", multiple=True, callback=_parse_kills, metavar="RANK:STEP",
    help="Kill RANK while it computes STEP (3 or later). Repeatable: kills at one step happen"
    " together, others one after the other.",
)  # fmt: skip
@click.option(
    "--kills", type=click.IntRange(1, 100), default=1, metavar="N",
    help="Without --kill: number of kills, at random steps. Default: 1.",
)  # fmt: skip
@click.option("--seed", type=int, metavar="N", help="Makes the random kills repeatable.")
@click.option(
    "--timeout", "timeout_sec", type=options.Number(min=1), default=600.0, metavar="SEC",
    help="Longest time of each run. Default: 600.",
)  # fmt: skip
@click.option("-v", "--verbose", is_flag=True, help="Also print what the runs print.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of text.")
@click.argument("launch", nargs=-1, required=True, type=click.UNPROCESSED, metavar="COMMAND...")
def command(
    steps: int | None,
    kill: tuple[tuple[int, int], ...],
    kills: int,
    seed: int | None,
    timeout_sec: float,
    verbose: bool,
    as_json: bool,
    launch: tuple[str, ...],
) -> None:
    """Checks whether your job resumes exactly: reft drill -- torchrun --nproc-per-node=2 train.py

    Runs COMMAND for a few steps undisturbed, runs it again and kills a rank with SIGKILL, and
    compares every step after the resume: tensors, random state, variables, positions, and the
    inputs of the models. If a step differs, it runs COMMAND undisturbed once more, to find what
    differs between undisturbed runs, too. Each run writes what the script writes (checkpoints,
    logs); reft removes its own files.

    \b
    Exit codes:
      0  exact
      1  not exact, not resumed, or the script is not deterministic
      2  the drill could not run
    """
    drawn = secrets.randbelow(10_000) if seed is None else seed
    settings = _Settings(steps, kill, kills, drawn, timeout_sec, verbose)
    if steps is not None and any(at >= steps for _, at in kill):
        raise agents.Failure(
            f"--steps {steps} ends before a step after the last --kill", EXIT_NOT_RUN
        )
    for name, off in (("REFT_DISABLE", "1"), ("REFT_SNAPSHOT", "0"), ("REFT_RESUME", "off")):
        if os.environ.get(name) == off:
            raise agents.Failure(f"{name}={off} is set, so nothing would be resumed", EXIT_NOT_RUN)
    try:
        understood = drill_launch.understand(launch)
    except drill_launch.NotUnderstood as error:
        raise agents.Failure(str(error), EXIT_NOT_RUN) from error
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, _stop)
    folder = _folder()
    try:
        drill = _Drill(settings, understood, shlex.join(launch), folder, quiet=as_json)
        report = drill.report()
    except _Stopped as stopped:
        raise SystemExit(stopped.code) from stopped
    finally:
        _remove(folder)
    if as_json:
        agents.print_json(report)
    else:
        drill_words.print_report(report)
    if report["outcome"] != drill_verdict.EXACT:
        raise SystemExit(agents.EXIT_WRONG)


def _stop(number: int, frame: FrameType | None) -> None:
    raise _Stopped(number)


def _folder() -> Path:
    """A folder of this drill's own: the run directory, and what the ranks write."""
    folder = Path(tempfile.mkdtemp(prefix="reft-drill-"))
    if len(str(folder)) > _LONGEST_FOLDER:
        folder.rmdir()
        folder = Path(tempfile.mkdtemp(prefix="reft-drill-", dir="/tmp"))
    return folder


def _remove(folder: Path) -> None:
    """The folder, and vaults that the user's REFT_VAULT_DIR has of these jobs."""
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    vaults = os.environ.get("REFT_VAULT_DIR", "")
    if vaults:
        for path in Path(vaults).glob(f"{folder.name}-*"):
            shutil.rmtree(path, ignore_errors=True)
    shutil.rmtree(folder, ignore_errors=True)


class _Drill:
    """One drill: its runs, one after the other."""

    def __init__(
        self,
        settings: _Settings,
        launch: drill_launch.Launch,
        shown: str,
        folder: Path,
        quiet: bool,
    ) -> None:
        self._settings, self._launch, self._folder = settings, launch, folder
        self._shown, self._quiet = shown, quiet
        last_kill = max((step for _, step in settings.kill), default=0)
        self._steps = settings.steps or max(10, last_kill + 3, _FIRST_KILL + 3 * settings.kills)
        self._said = ""  # by the disturbed run
        self._began = time.monotonic()

    def report(self) -> dict[str, Any]:
        """Makes all runs and returns the report."""
        drill_job.adopt_orphans()
        self._print(f"reft drill: {self._shown}")
        reference = self._undisturbed("a", "undisturbed")
        self._steps = min(self._steps, reference.last_step)
        kills = self._kills(reference)
        disturbed, failed = self._disturbed(kills)
        repeat = None
        if failed is None and drill_verdict.is_repeat_needed(reference, disturbed):
            repeat = self._undisturbed("c", "undisturbed once more, as they differ", "a")
        verdict = drill_verdict.judge(reference, disturbed, repeat)
        if failed is not None:
            verdict = Verdict(drill_verdict.NOT_RESUMED, failed)
        return self._as_json(verdict, reference, disturbed)

    # -- runs

    def _undisturbed(self, name: str, what: str, reference: str = "") -> Run:
        timed = 0 if reference else _TIMED
        code, run, log = self._run(name, what, (), reference, timed, 0)
        if code:
            raise self._failure(f"the {what.split()[0]} run ended with exit code {code}", log)
        if run.world == 0:
            raise self._failure('no rank has used backend="reft"', log)
        if run.errors():
            raise self._failure(f"a step could not be recorded: {run.errors()[0]}", log)
        if run.last_step < _FIRST_KILL + 1:
            raise self._failure(
                f"the script has taken {_voice.plural(run.last_step, 'optimizer step')} only; a"
                f" drill needs {_FIRST_KILL + 1}",
                log,
            )
        return run

    def _disturbed(self, kills: list[tuple[int, int, int]]) -> tuple[Run, str | None]:
        """The run with kills, and why it has failed, if it has."""
        attempts = kills[-1][0] + 1
        dead = [f"rank {rank} killed at step {step}" for _, rank, step in kills]
        what = ", ".join(dead[:2]) + (f" and {len(dead) - 2} more" if len(dead) > 2 else "")
        code, run, log = self._run("b", what, tuple(kills), "a", 0, attempts)
        self._said = log.read_text(errors="replace")
        if run.errors():
            raise self._failure(f"a step could not be recorded: {run.errors()[0]}", log)
        happened = len(list(run.all("kill")))
        if not happened:
            raise self._failure("the rank was not killed: it never came to that step", log)
        if code:
            return run, f"the restarted job ended with exit code {code}:\n{last_lines(self._said)}"
        if happened < len(kills):
            raise self._failure(f"{happened} of {len(kills)} kills have happened", log)
        return run, None

    def _run(
        self,
        name: str,
        what: str,
        kills: tuple[tuple[int, int, int], ...],
        reference: str,
        timed: int,
        restarts: int,
    ) -> tuple[int, Run, Path]:
        from reft._session.drill import Plan

        folder, log = self._folder / name, self._folder / f"{name}.log"
        folder.mkdir()
        compared = str(self._folder / reference) if reference else ""
        Plan(self._steps, timed, kills, compared).write(folder)
        argv = self._launch.argv(restarts, self._folder / "torchrun")
        began = time.monotonic()
        try:
            with self._progress(what, folder) as tick:
                code = drill_job.run(
                    argv, self._environment(name), log, self._settings.timeout_sec, tick
                )
        except drill_job.TimedOut as error:
            run = _events(folder)
            reached = f"all ranks came to step {run.last_step}"
            if run.world == 0:
                reached = 'no rank has used backend="reft" until then'
            raise self._failure(
                f"the run ({what}) has not ended after {self._settings.timeout_sec:.0f} s"
                f" (--timeout); {reached}",
                log,
            ) from error
        except OSError as error:
            raise agents.Failure(
                f"cannot start {argv[0]}: {error.strerror}", EXIT_NOT_RUN
            ) from error
        if self._settings.verbose:
            words.echo(log.read_text(errors="replace"), err=True)
        run = _events(folder)
        steps = _voice.plural(run.last_step, "step")
        self._print(f"  {what}: {steps} in {time.monotonic() - began:.1f} s")
        return code, run, log

    def _environment(self, name: str) -> dict[str, str]:
        """The ranks' environment: the user's, and where this run's files are."""
        inherited = {
            key: value for key, value in os.environ.items() if not key.startswith("REFT_FAULT")
        }
        return inherited | {
            "REFT_DRILL": str(self._folder / name),
            "REFT_JOB_ID": f"{self._folder.name}-{name}",
            "REFT_RUN_DIR": str(self._folder / "run"),
            "REFT_RESUME_VERIFY": "off",  # the drill compares all steps itself
        }

    def _kills(self, reference: Run) -> list[tuple[int, int, int]]:
        """(attempt, rank, step) of each kill."""
        world, last = reference.world, self._steps
        chosen = sorted(set(self._settings.kill), key=lambda one: (one[1], one[0]))
        for rank, step in chosen:
            if rank >= world:
                raise agents.Failure(
                    f"--kill {rank}:{step}: the job has ranks 0 to {world - 1}", EXIT_NOT_RUN
                )
            if step >= last:
                raise agents.Failure(
                    f"--kill {rank}:{step}: the script has only {last} steps, and one after the"
                    " kill is needed",
                    EXIT_NOT_RUN,
                )
        if not chosen:
            drawn = random.Random(self._settings.seed)
            possible = range(_FIRST_KILL, max(_FIRST_KILL + 1, last - _AFTER + 1))
            count = min(self._settings.kills, len(possible))
            steps = sorted(drawn.sample(possible, count))
            chosen = [(drawn.randrange(world), step) for step in steps]
        at = sorted({step for _, step in chosen})
        return [(at.index(step), rank, step) for rank, step in chosen]

    # -- words

    def _print(self, text: str) -> None:
        if not self._quiet:
            words.echo(text)

    def _progress(self, what: str, folder: Path) -> _Progress:
        return _Progress(what, folder, self._steps, not self._quiet)

    def _failure(self, why: str, log: Path) -> agents.Failure:
        """A failure with the last lines that the run has printed."""
        tail = last_lines(log.read_text(errors="replace")) if log.exists() else ""
        return agents.Failure(f"{why}\n{tail}" if tail else why, EXIT_NOT_RUN)

    def _as_json(self, verdict: Verdict, reference: Run, disturbed: Run) -> dict[str, Any]:
        last = max((e for _, e in disturbed.all("step")), key=lambda e: (e["attempt"], e["step"]))
        named: dict[tuple[str, ...], None] = {}
        for _, event in disturbed.all("step", "resumed"):
            for note in (*event.get("uncaptured", []), *event.get("lost", [])):
                named[tuple(note)] = None
        messages = dict.fromkeys(
            found[1] for line in self._said.splitlines() if (found := _MESSAGE.match(line))
        )
        cost = drill_verdict.step_cost(reference)
        return {
            "outcome": verdict.outcome,
            "trained_alike": verdict.trained_alike,
            "reason": verdict.reason,
            "command": self._shown,
            "ranks": reference.world,
            "steps": self._steps,
            "seed": self._settings.seed,
            "seconds": round(time.monotonic() - self._began, 1),
            "kills": [
                {**dataclasses.asdict(kill), "lost": kill.lost}
                for kill in drill_verdict.kills_of(disturbed)
            ],
            "compared": {
                "first_step": verdict.steps[0] if verdict.steps else None,
                "last_step": verdict.steps[1] if verdict.steps else None,
                "tensors": last.get("tensors", 0),
                "state_bytes": last["state_bytes"],
                "model_calls": len(last["fed"]),
            },
            "differences": [dataclasses.asdict(one) for one in verdict.differences],
            "unsteady": [dataclasses.asdict(one) for one in verdict.unsteady],
            "not_restorable": [list(note) for note in named],
            "messages": list(messages),
            "cost": None
            if cost is None
            else {"step_sec": cost[0], "snapshot_sec": cost[1], "bytes": last["bytes"]},
            "lost_node": _lost_node(last, reference),
        }


def last_lines(said: str) -> str:
    """The last lines that ranks have printed, without those that torchrun adds after a failure."""
    lines = said.splitlines()
    failed = [at for at, line in enumerate(lines) if _FAILED.search(line)]
    lines = [line for line in lines[: failed[-1]] if not _LAUNCHER.match(line)] if failed else lines
    return "\n".join(f"  | {line}" for line in lines[-_TAIL:])


class _Progress:
    """A line on the terminal with the progress of a run; none without a terminal."""

    def __init__(self, what: str, folder: Path, steps: int, is_shown: bool) -> None:
        self._what, self._folder, self._steps = what, folder, steps
        self._console = words.console()
        self._status = None
        if is_shown and self._console.is_terminal:
            self._status = self._console.status(Text(f"{what}: starting"))

    def __enter__(self) -> Callable[[], None]:
        if self._status is not None:
            self._status.start()
        return self._tick

    def __exit__(self, *error: object) -> None:
        if self._status is not None:
            self._status.stop()

    def _tick(self) -> None:
        if self._status is not None:
            step = _events(self._folder).last_step
            text = f"step {step} of {self._steps}" if step else "starting"
            self._status.update(Text(f"{self._what}: {text}"))


def _events(folder: Path) -> Run:
    """What the ranks of a run have written so far."""
    events: dict[int, list[drill_verdict.Event]] = {}
    for path in folder.glob("rank-*.jsonl"):
        lines = path.read_text(encoding="utf-8").split("\n")[:-1]  # whole ones
        events[int(path.stem.removeprefix("rank-"))] = [json.loads(line) for line in lines]
    return Run(events)


def _lost_node(last: drill_verdict.Event, reference: Run) -> dict[str, Any]:
    """What the loss of a node would cost under the current protection."""
    protection = os.environ.get("REFT_SNAPSHOT_PROTECTION") or "none"
    if protection == "none":
        text = (
            "not covered (REFT_SNAPSHOT_PROTECTION=none): training would start from its beginning,"
            " or from the script's own checkpoint"
        )
    elif last["node_loss"]:
        text = f"not survived in spite of {protection}: {last['node_loss']}"
    elif protection == AUTO:
        text = (
            "with auto, the ranks of a job with several nodes choose at the first step how what a"
            " lost node had comes back; reft prints what they chose"
        )
    elif is_copied(protection):
        text = (
            f"with {protection}, all that a lost node had comes back from its copy on another node,"
            " if the job has several"
        )
    else:
        text = (
            f"with {protection}, what a lost node had comes back from the others, where the job has"
            " replicas on different nodes; reft prints at the first step whether it has"
        )
        if last["private"]:
            text += (
                f"; {_voice.plural(len(last['private']), 'tensor')} (buffers and hyperparameters,"
                f" first: {last['private'][0]}) would be another rank's"
            )
    return {
        "protection": protection,
        "shared_tensors": last["shared"],
        "private_tensors": len(last["private"]),
        "text": text,
    }
