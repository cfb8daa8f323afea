"""Vaults as `ls` and `verify` find them: files under a directory, or what an agent holds."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from reft._cli import agents
from reft._link import agent_protocol as protocol
from reft._link import job_identity


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
        """A descriptor for reading, closed afterwards."""
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
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # of a FIFO: do not wait
    except OSError as error:
        raise agents.Failure(f"{path}: {error.strerror}", agents.EXIT_NOTHING) from error
    info = os.fstat(fd)
    problem = ""
    if not stat.S_ISREG(info.st_mode):
        problem = "is no regular file"
    elif info.st_uid not in (0, os.geteuid()) and os.geteuid() != 0:
        problem = f"belongs to user {info.st_uid}"
    if problem:
        os.close(fd)
        raise agents.Failure(f"{path} {problem}", agents.EXIT_NOTHING)
    return fd


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
