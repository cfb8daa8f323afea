"""Separates the ranks of one attempt from earlier attempts in the launcher's store.

Threads: the training thread. Errors: `RuntimeError` if a rank does not join in time.
"""

from __future__ import annotations

import contextlib
import random
import re
import secrets
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from reft._link.secret import Attempt, Secret
from reft._torch.latecomers import Latecomers, Missing

_SHORTEST_PAUSE = 0.001
_LONGEST_PAUSE = 0.05
_PAUSE_PER_RANK = 1e-4  # seconds; the store answers a few ten thousand requests in one
_TAKING_SEC = 2.0  # a rank that waits for an answer takes it sooner
_NUMBER = re.compile(rb"[0-9a-f]{16}")
_ANSWER = re.compile(rb"([0-9a-f]{16}) ([0-9a-f]{16}) ([0-9a-f]{64}|)")
_MOST_ABSENT = 256  # ranks that one look at the store searches for

_jitter = random.SystemRandom()  # neither the script's generator nor one that forked ranks share


def agree(
    store: Any,
    rank: int,
    size: int,
    timeout: timedelta,
    late: Latecomers | None = None,
    secret: Secret | None = None,
) -> Attempt:
    """Agrees on a key prefix that no earlier attempt of the job has used.

    torchrun keeps one store across restarts, with the addresses of dead ranks in it. Its restart
    count may differ between nodes, and not every restart changes it (elastic membership). So rank 0
    draws a random number. Each other rank draws one of its own, and rank 0 sends its number in
    reply to that: no rank mistakes a reply to a dead rank for its own.

    Args:
        late: is told who is missing while this rank waits.
        secret: of rank 0. With it, rank 0 proves its answers to ranks that have it, too, so that
            none can be made to take part in an earlier attempt.

    Raises:
        RuntimeError: some rank did not join before the timeout.
    """
    if size == 1:
        return Attempt(secrets.token_hex(8), secret=secret)
    keys = dist.PrefixStore("reft/agree", store)
    deadline = time.monotonic() + timeout.total_seconds()
    if rank == 0:
        return Attempt(_answer(keys, size, deadline, late, secret), secret=secret)
    return _ask(keys, rank, size, deadline, late)


def _ask(keys: Any, rank: int, size: int, deadline: float, late: Latecomers | None) -> Attempt:
    """Gets the number from rank 0."""
    own = secrets.token_hex(8)
    keys.set(f"ask/{rank}", own)
    pause = _SHORTEST_PAUSE

    def missing(of: Sequence[int] | None) -> Missing:
        others = range(size) if of is None else of
        unseen = _absent(keys, [n for n in others if n not in (0, rank) and n < size])
        cut = len(unseen) >= _MOST_ABSENT
        return Missing(unseen, [0] if 0 in others else [], cut)

    while True:
        if keys.check([f"answer/{rank}"]):
            # Anybody can write there; what is no answer to this rank is as if it were not there.
            answer = _ANSWER.fullmatch(bytes(keys.get(f"answer/{rank}")))
            if answer is not None and answer[1].decode() == own:
                number, proof = answer[2].decode(), answer[3].decode()
                keys.set(f"taken/{rank}", number)
                return Attempt(number, own, proof)
        if late is not None:
            late.tick(missing, lambda turn, renew: _claim(keys, turn, renew))
        _pause(deadline, pause, "rank 0 does not answer")
        pause = min(pause * 1.5, _longest_pause(size))


def _answer(
    keys: Any, size: int, deadline: float, late: Latecomers | None, secret: Secret | None
) -> str:
    """Draws the number and sends it to all other ranks."""
    number = secrets.token_hex(8)
    answered: dict[int, tuple[bytes, float]] = {}  # question, and when it was answered
    waiting = set(range(1, size))
    pause = _SHORTEST_PAUSE

    def missing(of: Sequence[int] | None) -> Missing:
        absent = sorted(waiting if of is None else waiting.intersection(of))
        before = time.monotonic() - _TAKING_SEC
        return Missing(
            [other for other in absent if other not in answered],
            [other for other in absent if other in answered and answered[other][1] < before],
        )

    while True:
        for other in sorted(waiting):
            # Read again in each round: the value read may be left over from a dead rank.
            if not keys.check([f"ask/{other}"]):
                continue
            question = bytes(keys.get(f"ask/{other}"))
            if not _NUMBER.fullmatch(question):
                continue
            if other not in answered or answered[other][0] != question:
                asked = question.decode()
                proof = "" if secret is None else secret.proof(other, asked, number)
                keys.set(f"answer/{other}", f"{asked} {number} {proof}")
                answered[other] = question, time.monotonic()
                pause = _SHORTEST_PAUSE
            elif _has_taken(keys, other, number):
                waiting.discard(other)
        if not waiting:
            return number
        if late is not None:
            late.tick(missing, lambda *_: True)
        absent = missing(None)
        _pause(
            deadline,
            pause,
            f"ranks {absent.unseen} did not join"
            if absent.unseen
            else "some ranks did not take the answer",
        )
        pause = min(pause * 1.5, _longest_pause(size))


def _has_taken(keys: Any, rank: int, number: str) -> bool:
    key = f"taken/{rank}"
    return keys.check([key]) and bytes(keys.get(key)) == number.encode()


def _absent(keys: Any, ranks: Sequence[int]) -> list[int]:
    """Those of the ranks that have not asked, but not more than `_MOST_ABSENT`.

    One request covers many ranks, and halves of them only where one is absent.
    """
    absent: list[int] = []
    spans = [ranks] if ranks else []
    while spans and len(absent) < _MOST_ABSENT:
        span = spans.pop()
        if keys.check([f"ask/{rank}" for rank in span]):
            continue
        if len(span) == 1:
            absent.append(span[0])
        else:
            half = len(span) // 2
            spans += [span[half:], span[:half]]
    return absent


def _claim(keys: Any, turn: int, renew: bool) -> bool:
    """Whether this rank speaks for those that wait for rank 0: no other has, in this turn and the
    two before. A claim of an earlier attempt is soon too old to count. Where clocks differ between
    hosts, two may speak.

    Args:
        renew: it speaks already.
    """
    if renew:
        keys.add(f"late/{turn}", 1)
        return True
    # Only who speaks leaves a mark: those of ranks that may not would keep all silent for ever.
    if any(keys.check([f"late/{number}"]) for number in (turn, turn - 1, turn - 2)):
        return False
    return bool(keys.add(f"late/{turn}", 1) == 1)


def _longest_pause(size: int) -> float:
    """Seconds between two questions of a rank to the store, which all ranks share."""
    return max(_LONGEST_PAUSE, size * _PAUSE_PER_RANK)


def _pause(deadline: float, seconds: float, what: str) -> None:
    if time.monotonic() > deadline:
        raise RuntimeError(
            f"backend reft: {what} before the timeout of the process group. Check that every rank"
            " runs and has the same REFT_DISABLE"
        )
    time.sleep(seconds * _jitter.uniform(0.5, 1.0))  # else all ranks ask at once


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
