"""What dead agents left in the run directory, and its removal.

An agent holds a lock on `agent.lock` in the directory of its node as long as it lives, so a process
that gets the lock knows that no agent runs there. As when an agent ends, hang reports (`verdicts/`)
stay, and so do the logs next to them.
"""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_LOCK, _SOCKET, _VERDICTS = "agent.lock", "agent.sock", "verdicts"
_LOGS = ("agent.log", "agent.log.1")


def _is_ours(path: Path, kind: int) -> bool:
    """True if the path itself, not what a link points to, is of this kind and of this user."""
    try:
        info = path.lstat()
    except OSError:
        return False
    return stat.S_IFMT(info.st_mode) == kind and info.st_uid == os.getuid()


@contextmanager
def _locked(directory: Path) -> Iterator[bool]:
    """Yields True while no agent can live in the directory; False if one does."""
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        lock = os.open(directory / _LOCK, flags, 0o600)
    except OSError:
        yield False
        return
    try:
        yield _is_alone(lock, directory / _LOCK)
    finally:
        os.close(lock)


def _is_alone(lock: int, path: Path) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # An agent that ended meanwhile has removed the file that is open here.
        return os.path.samestat(os.fstat(lock), path.stat())
    except OSError:
        return False


def directories(run_dir: Path) -> list[Path]:
    """Directories of nodes in which an agent of this user left its socket; one may be alive."""
    return [
        path
        for path in sorted(run_dir.glob("*/node-*"))
        if _is_ours(path, stat.S_IFDIR)
        and _is_ours(path.parent, stat.S_IFDIR)
        and _is_ours(path / _SOCKET, stat.S_IFSOCK)
    ]


def clean(run_dir: Path) -> list[Path]:
    """Removes sockets, logs and locks of dead agents, and directories that are empty then.

    Only what belongs to this user. No agent can start in a directory meanwhile.

    Returns:
        Everything that was removed, in this order.
    """
    removed = []
    for directory in directories(run_dir):
        with _locked(directory) as dead:
            if not dead:
                continue
            traces = [_SOCKET] if (directory / _VERDICTS).exists() else [_SOCKET, *_LOGS]
            # The lock goes last: an agent that waits for it notices that the file is gone.
            for path in (directory / name for name in [*traces, _LOCK]):
                if _is_ours(path, stat.S_IFREG) or _is_ours(path, stat.S_IFSOCK):
                    path.unlink()
                    removed.append(path)
        for folder in (directory, directory.parent):
            try:
                folder.rmdir()
            except OSError:  # not empty: verdicts, another node
                break
            removed.append(folder)
    return removed
