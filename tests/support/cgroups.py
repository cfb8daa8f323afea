"""A control group with a memory limit, whose processes the kernel's OOM killer ends."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def limited(name: str, limit: int) -> Iterator[Path | None]:
    """The list of processes of a new group that may have `limit` bytes; None if none can be made
    here. What is left in it at the end is killed."""
    for folder, file in (("memory/", "memory.limit_in_bytes"), ("", "memory.max")):
        group = Path(f"/sys/fs/cgroup/{folder}{name}")
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            if _is_limited(group, file, limit):
                yield group / "cgroup.procs"
                return
        finally:
            _remove(group)
    yield None


def _is_limited(group: Path, file: str, limit: int) -> bool:
    try:
        (group / file).write_text(str(limit))
        (group / "cgroup.procs").open("w").close()
    except OSError:
        return False
    return True


def _remove(group: Path) -> None:
    """Ends what is left in the group, the agent that a rank in it has started, and removes it."""
    deadline = time.monotonic() + 20
    while True:
        with contextlib.suppress(OSError):
            group.rmdir()
            return
        assert time.monotonic() < deadline, f"{group} stays busy"
        with contextlib.suppress(OSError):
            for process in (group / "cgroup.procs").read_text().split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(process), signal.SIGKILL)
        time.sleep(0.01)
