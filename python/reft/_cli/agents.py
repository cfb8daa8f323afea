"""Finds agents and asks them, for all commands alike.

Exit codes of every command: 0 done and nothing wrong, 1 the command found something wrong, 2 wrong
usage, 3 nothing found to inspect, 4 an agent did not answer.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import click

from reft._cli import words
from reft._link import agent_protocol as protocol
from reft._link import job_identity

EXIT_WRONG = 1
EXIT_NOTHING = 3
EXIT_NO_ANSWER = 4

_ANSWER_SEC = 20.0
_MOST_MESSAGE = 4000  # characters

F = TypeVar("F", bound=Callable[..., Any])


class Failure(click.ClickException):
    """Ends a command with a sentence and one of the exit codes above."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code  # type: ignore[misc]  # click reads it from the instance
        context = click.get_current_context(silent=True)
        self._as_json = bool(context is not None and context.params.get("as_json"))

    def show(self, file: Any = None) -> None:
        if self._as_json:
            words.echo(json.dumps({"error": self.message[:_MOST_MESSAGE]}))
        else:
            words.echo(f"reft: {self.message}", err=True)


def write_file(path: str | Path, text: str) -> None:
    """Writes a file that the user named; what is not Unicode becomes '?'.

    Raises:
        Failure: it cannot be written.
    """
    try:
        Path(path).write_text(text, encoding="utf-8", errors="replace")
    except OSError as error:
        raise Failure(f"cannot write {path}: {error.strerror}", EXIT_WRONG) from error


@dataclass(frozen=True)
class Agent:
    """One running agent, identified by the path of its socket."""

    job: str
    node: int
    path: Path

    def ask(
        self, kind: int, payload: dict[str, Any] | None = None
    ) -> tuple[dict[str, Any], int | None]:
        """Sends one request.

        Returns:
            The answer's JSON, and a descriptor if one came with it; the caller closes it.

        Raises:
            Failure: the agent does not answer, or answers with an error.
        """
        try:
            with protocol.AgentConnection(self.path, timeout_sec=_ANSWER_SEC) as connection:
                answer, reply, fd = connection.request(kind, payload or {})
        except ConnectionRefusedError as error:
            raise Failure(
                f"the agent of job {self.job} (node {self.node}) has ended; its socket remains:"
                f" {self.path}",
                EXIT_NO_ANSWER,
            ) from error
        except (OSError, ValueError) as error:
            raise Failure(
                f"the agent of job {self.job} (node {self.node}) did not answer: {error}",
                EXIT_NO_ANSWER,
            ) from error
        if answer == protocol.ERROR:
            raise Failure(
                f"the agent of job {self.job} reports: {reply.get('what', reply)}", EXIT_NO_ANSWER
            )
        return reply, fd

    def is_gone(self) -> bool:
        """True if no process listens on the socket any more."""
        try:
            protocol.AgentConnection(self.path, timeout_sec=_ANSWER_SEC).close()
        except ConnectionRefusedError:
            return True
        except (OSError, ValueError):
            pass
        return False


def run_dir(given: str | None) -> Path:
    """Where agents put their sockets: the option, REFT_RUN_DIR, or the default."""
    text = given or os.environ.get("REFT_RUN_DIR", "")
    return Path(text) if text else job_identity.default_run_dir()


def find(directory: Path) -> list[Agent]:
    """Agents whose sockets lie under `directory`, by job and node; some may be dead."""
    found = []
    for path in protocol.find_agents(directory):
        name = path.parent.name.removeprefix("node-")
        found.append(Agent(path.parent.parent.name, int(name) if name.isdigit() else 0, path))
    return sorted(found, key=lambda agent: (agent.job, agent.node))


def select(directory: Path, job: str | None) -> list[Agent]:
    """The agents of one job.

    Args:
        job: its name, as in REFT_JOB_ID or in the run directory; None: the only job.

    Raises:
        Failure: no such agent, or several jobs run and `job` is None.
    """
    agents = find(directory)
    if job is not None:
        agents = [agent for agent in agents if agent.job in (job, job_identity.safe_id(job))]
        if not agents:
            raise Failure(f"no agent of job {job} runs here (looked in {directory})", EXIT_NOTHING)
        return agents
    if not agents:
        raise Failure(
            f"no agent runs here (looked in {directory}; set REFT_RUN_DIR or --run-dir)",
            EXIT_NOTHING,
        )
    jobs = sorted({agent.job for agent in agents})
    if len(jobs) > 1:
        agents = [agent for agent in agents if not agent.is_gone()] or agents[:1]
        jobs = sorted({agent.job for agent in agents})
    if len(jobs) > 1:
        raise Failure("several jobs run here, choose one with --job: " + ", ".join(jobs), 2)
    return agents


def common_options(function: F) -> F:
    """--job, --run-dir and --json."""
    function = click.option(
        "--json", "as_json", is_flag=True, help="Print one JSON object instead of text."
    )(function)
    function = click.option(
        "--run-dir", metavar="DIR", help="Directory of the agents' sockets. Default: REFT_RUN_DIR."
    )(function)
    return click.option("--job", metavar="NAME", help="Which job, if several run here.")(function)


def print_json(value: Any) -> None:
    """Prints one object; escapes everything in its strings that is not printable ASCII."""
    click.echo(json.dumps(value, indent=2))
