"""What the ranks of one attempt share in the launcher's store: a key prefix of their own.

Threads: the training thread. Errors: `RuntimeError` if a rank does not come in time.
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

    torchrun keeps one store over restarts, with the addresses of dead ranks in it, and its restart
    count is neither equal on all nodes nor changed by every restart (elastic membership). So rank 0
    draws a number, and sends it to each rank in answer to a number that this rank has drawn: no
    rank takes an answer to a dead rank for its own.

    Raises:
        RuntimeError: some rank did not come before the timeout.
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
            # Read again in each round: a dead rank may have left what was read.
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
            f"ranks {missing} did not come" if missing else "some ranks did not take the answer",
        )
        pause = min(pause * 1.5, _LONGEST_PAUSE)
    return number


def _pause(deadline: float, seconds: float, what: str) -> None:
    if time.monotonic() > deadline:
        raise RuntimeError(
            f"backend reft: {what} before the timeout of the process group. Check that every rank"
            " runs, with the same REFT_DISABLE"
        )
    time.sleep(seconds)


def withdraw_signals(store: Any) -> None:
    """Deletes what the watchdogs of an earlier attempt have left in the launcher's store, before
    the watchdogs of this attempt read it.

    ProcessGroupNCCL reports a failure to all ranks under one key, past every prefix, so torchrun's
    store still has it after the restart: each rank would dump its flight recorder and end 8 minutes
    later (TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC), whatever it does.
    """
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    for key in ("exception_dump", "remote_error"):
        with contextlib.suppress(RuntimeError):  # a store that cannot delete
            store.delete_key(key)
