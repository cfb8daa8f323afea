"""Separates the ranks of one attempt from earlier attempts in the launcher's store.

Threads: the training thread. Errors: `RuntimeError` if a rank does not join in time.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist

_SHORTEST_PAUSE = 0.001
_LONGEST_PAUSE = 0.05


def agree_on_prefix(store: Any, rank: int, size: int, timeout: timedelta) -> str:
    """Agrees on a key prefix that no earlier attempt of the job has used.

    torchrun keeps one store across restarts, with the addresses of dead ranks in it. Its restart
    count may differ between nodes, and not every restart changes it (elastic membership). So rank 0
    draws a random number. Each other rank draws one of its own, and rank 0 sends its number in
    reply to that: no rank mistakes a reply to a dead rank for its own.

    Raises:
        RuntimeError: some rank did not join before the timeout.
    """
    if size == 1:
        return f"reft/{secrets.token_hex(8)}/"
    keys = dist.PrefixStore("reft/agree", store)
    deadline = time.monotonic() + timeout.total_seconds()
    number = _ask(keys, rank, deadline) if rank != 0 else _answer(keys, size, deadline)
    return f"reft/{number}/"


def _ask(keys: Any, rank: int, deadline: float) -> str:
    """Gets the number from rank 0."""
    own = secrets.token_hex(8)
    keys.set(f"ask/{rank}", own)
    pause = _SHORTEST_PAUSE
    while True:
        if keys.check([f"answer/{rank}"]):
            asked, _, number = bytes(keys.get(f"answer/{rank}")).decode().partition(" ")
            if asked == own:
                keys.add(f"taken/{number}", 1)
                return number
        _pause(deadline, pause, "rank 0 does not answer")
        pause = min(pause * 1.5, _LONGEST_PAUSE)


def _answer(keys: Any, size: int, deadline: float) -> str:
    """Draws the number and sends it to all other ranks."""
    number = secrets.token_hex(8)
    answered: dict[int, bytes] = {}
    pause = _SHORTEST_PAUSE
    while keys.add(f"taken/{number}", 0) < size - 1:
        for other in range(1, size):
            # Read again in each round: the value read may be left over from a dead rank.
            if keys.check([f"ask/{other}"]):
                question = bytes(keys.get(f"ask/{other}"))
                if answered.get(other) != question:
                    keys.set(f"answer/{other}", question.decode() + " " + number)
                    answered[other] = question
                    pause = _SHORTEST_PAUSE
        missing = [other for other in range(1, size) if other not in answered]
        _pause(
            deadline,
            pause,
            f"ranks {missing} did not join" if missing else "some ranks did not take the answer",
        )
        pause = min(pause * 1.5, _LONGEST_PAUSE)
    return number


def _pause(deadline: float, seconds: float, what: str) -> None:
    if time.monotonic() > deadline:
        raise RuntimeError(
            f"backend reft: {what} before the timeout of the process group. Check that every rank"
            " runs and has the same REFT_DISABLE"
        )
    time.sleep(seconds)


def withdraw_signals(store: Any) -> None:
    """Deletes failure signals of an earlier attempt from the launcher's store, before the watchdogs
    of this attempt read them.

    ProcessGroupNCCL signals a failure to all ranks under keys without any prefix, so torchrun's
    store still has them after the restart. Each rank would dump its flight recorder and exit 8
    minutes later (TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC), whatever it does.
    """
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    for key in ("exception_dump", "remote_error"):
        with contextlib.suppress(RuntimeError):  # a store that cannot delete
            store.delete_key(key)
