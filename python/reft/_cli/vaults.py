"""Vaults as `ls`, `verify` and `report` find them: files in a directory, or what an agent holds."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reft._cli import agents
from reft._link import agent_protocol as protocol
from reft._link import job_identity


class Foreign(agents.Failure):
    """An entry that is named like a vault and is not a regular file, so reft has not made it.

    Attributes:
        entry: its path, and what it is instead.
    """

    def __init__(self, path: Path, what: str) -> None:
        self.entry = {"path": str(path), "what": what}
        super().__init__(not_a_vault(self.entry), agents.EXIT_NOTHING)


@dataclass(frozen=True)
class Vault:
    """A vault that can be opened for reading."""

    name: str
    path: Path | None = None
    agent: agents.Agent | None = None
    rank: int = -1
    live: bool | None = None

    @contextmanager
    def open(self) -> Iterator[int]:
        """A descriptor for reading, closed afterwards.

        Raises:
            Foreign: there is no file to open.
            OSError: the file cannot be opened, or belongs to another user.
            Failure: the agent does not answer.
        """
        if self.path is not None:
            fd: int | None = _open(self.path)
        else:
            assert self.agent is not None
            _, fd = self.agent.ask(protocol.VAULT_GET, {"rank": self.rank})
        if fd is None:
            raise agents.Failure(
                f"{self.name}: the agent sent no descriptor", agents.EXIT_NO_ANSWER
            )
        try:
            yield fd
        finally:
            os.close(fd)


def _open(path: Path) -> int:
    """A vault file for reading.

    Another user could truncate their file while it is mapped, which would end this process. So only
    root opens files of other users.
    """
    try:
        _need_file(path, path.stat())  # a socket cannot be opened at all
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # of a FIFO: do not wait
    except OSError as error:
        raise OSError(error.strerror) from error
    try:
        info = os.fstat(fd)
        _need_file(path, info)
        if info.st_uid not in (0, os.geteuid()) and os.geteuid() != 0:
            raise OSError(f"belongs to user {info.st_uid}")
    except BaseException:
        os.close(fd)
        raise
    return fd


def _need_file(path: Path, info: os.stat_result) -> None:
    if not stat.S_ISREG(info.st_mode):
        what = "a directory" if stat.S_ISDIR(info.st_mode) else "a FIFO, a socket or a device"
        raise Foreign(path, what)


def read(
    found: list[Vault], one: Callable[[Vault], dict[str, Any]]
) -> tuple[list[dict[str, Any]], list[dict[str, str]]]:
    """What `one` returns of each vault; and `Foreign.entry` of each entry that is none.

    Raises:
        Failure: no entry is a vault, or an agent does not answer.
    """
    results: list[dict[str, Any]] = []
    foreign: list[dict[str, str]] = []
    for vault in found:
        try:
            results.append(one(vault))
        except Foreign as error:
            foreign.append(error.entry)
    if not results:
        named = "; ".join(map(not_a_vault, foreign))
        raise agents.Failure(f"no vault here: {named}", agents.EXIT_NOTHING)
    return results, foreign


def not_a_vault(entry: dict[str, str]) -> str:
    """A line about an entry that `read` leaves out."""
    return f"{entry['path']} is not a vault but {entry['what']}"


def find(vault_dir: str | None, job: str | None, run_dir: str | None) -> list[Vault]:
    """Vaults of a directory, else of the job's agents on this machine.

    Raises:
        Failure: there are none.
    """
    if vault_dir is not None:
        root = Path(vault_dir)
        paths = sorted(root.rglob("*.vault")) if root.is_dir() else [root] if root.is_file() else []
        if job is not None:
            paths = [
                path
                for path in paths
                if not {job, job_identity.safe_id(job)}.isdisjoint(path.parts)
            ]
        if not paths:
            raise agents.Failure(
                "no *.vault" + (f" of job {job}" if job else "") + f" under {root}",
                agents.EXIT_NOTHING,
            )
        return [Vault(str(path), path=path) for path in paths]
    found = []
    for agent in agents.select(agents.run_dir(run_dir), job):
        inventory, _ = agent.ask(protocol.VAULT_LIST)
        for entry in sorted(inventory.get("vaults", []), key=lambda vault: int(vault["rank"])):
            rank = int(entry["rank"])
            found.append(
                Vault(f"rank {rank}", agent=agent, rank=rank, live=bool(entry.get("live")))
            )
    if not found:
        raise agents.Failure("the agent holds no vaults (yet)", agents.EXIT_NOTHING)
    return found
