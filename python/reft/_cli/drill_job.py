"""Runs the job of a drill and leaves no process behind.

Ranks lead sessions of their own, and the agent leaves its parent. So this process adopts all
descendants that lose theirs (PR_SET_CHILD_SUBREAPER), and ends them by walking down from itself.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

_PR_SET_CHILD_SUBREAPER = 36
_PAUSE_SEC = 0.05
_END_SEC = 20.0


class TimedOut(Exception):
    """The job has not ended in time; it is gone now."""


def adopt_orphans() -> None:
    """Makes this process the parent of descendants whose own parent ends."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def run(
    argv: Sequence[str],
    env: Mapping[str, str],
    log: Path,
    timeout_sec: float,
    tick: Callable[[], None],
) -> int:
    """Runs a launcher to its end. Ends all processes that it has started, whatever happens.

    Args:
        log: gets all output.
        timeout_sec: longest time that it may take.
        tick: called several times a second.

    Returns:
        Its exit status.

    Raises:
        TimedOut: it took too long.
        OSError: it cannot be started.
    """
    until = time.monotonic() + timeout_sec
    with open(log, "wb") as output:
        process = subprocess.Popen(
            argv,
            env=dict(env),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C is this process's to handle
        )
    try:
        while process.poll() is None:
            if time.monotonic() > until:
                raise TimedOut
            tick()
            time.sleep(_PAUSE_SEC)
        return process.returncode
    finally:
        end_descendants()


def end_descendants() -> None:
    """Kills all processes below this one and waits until they are gone."""
    before = [signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)]
    try:
        until = time.monotonic() + _END_SEC
        while (pids := descendants(os.getpid())) and time.monotonic() < until:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            _reap()
            time.sleep(0.01)
        _reap()
    finally:
        for number, handler in zip((signal.SIGINT, signal.SIGTERM), before, strict=True):
            signal.signal(number, handler)


def descendants(pid: int) -> list[int]:
    """Living processes below one, zombies left out."""
    children: dict[int, list[tuple[int, str]]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = path.read_text().rsplit(")", 1)[1].split()[:2]
        except (OSError, IndexError, ValueError):
            continue
        children.setdefault(int(parent), []).append((int(path.parent.name), state))
    found, waiting = [], [pid]
    while waiting:
        for child, state in children.get(waiting.pop(), []):
            waiting.append(child)
            if state not in "ZX":
                found.append(child)
    return found


def _reap() -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
