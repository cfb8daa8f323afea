"""Ranks of one attempt agree on a key prefix, whatever dead ranks have left in the store."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from reft._torch import attempt

SHORT = timedelta(seconds=0.3)
LONG = timedelta(seconds=20)


def agree(store: Any, ranks: list[int], size: int, timeout: timedelta = LONG) -> list[str]:
    with ThreadPoolExecutor(len(ranks)) as pool:
        calls = [pool.submit(attempt.agree, store, r, size, timeout) for r in ranks]
        return [call.result().prefix for call in calls]


def test_all_ranks_get_the_same_prefix() -> None:
    (prefix,) = set(agree(dist.HashStore(), [0, 1, 2, 3], 4))
    assert prefix.startswith("reft/") and prefix.endswith("/")


def test_each_attempt_gets_another_one() -> None:
    store = dist.HashStore()
    first, second = set(agree(store, [0, 1, 2], 3)), set(agree(store, [0, 1, 2], 3))
    assert len(first) == len(second) == 1 and first != second


def test_an_answer_to_a_dead_rank_is_not_taken() -> None:
    store = dist.HashStore()
    (dead,) = set(agree(store, [0, 1], 2))
    found: list[str] = []
    asking = threading.Thread(
        target=lambda: found.append(attempt.agree(store, 1, 2, LONG).prefix)
    )
    asking.start()  # the old answer stands in the store meanwhile
    asking.join(0.2)
    assert found == []
    (prefix,) = agree(store, [0], 2)
    asking.join()
    assert found == [prefix] and prefix != dead


def test_a_single_rank_needs_no_store() -> None:
    assert attempt.agree(None, 0, 1, SHORT) != attempt.agree(None, 0, 1, SHORT)


def test_the_first_rank_names_those_that_do_not_come() -> None:
    with pytest.raises(RuntimeError, match=r"ranks \[1, 2\] did not join before the timeout"):
        attempt.agree(dist.HashStore(), 0, 3, SHORT)


def test_a_rank_that_asks_and_dies_is_missed() -> None:
    store = dist.HashStore()
    dist.PrefixStore("reft/agree", store).set("ask/1", "0123456789abcdef")
    with pytest.raises(RuntimeError, match="some ranks did not take the answer"):
        attempt.agree(store, 0, 2, SHORT)


def test_a_rank_gives_up_waiting_for_the_first() -> None:
    with pytest.raises(RuntimeError, match="rank 0 does not answer before the timeout"):
        attempt.agree(dist.HashStore(), 1, 2, SHORT)


def test_signals_of_an_earlier_attempt_are_withdrawn_past_every_prefix() -> None:
    store = dist.HashStore()
    for key in ("exception_dump", "remote_error", "other"):
        store.set(key, "1")
    attempt.withdraw_signals(dist.PrefixStore("a", dist.PrefixStore("b", store)))
    assert not store.check(["exception_dump"]) and not store.check(["remote_error"])
    assert store.check(["other"])


def test_a_store_that_cannot_delete_is_left_alone() -> None:
    class Fixed:
        def delete_key(self, key: str) -> bool:
            raise RuntimeError("not implemented")

    attempt.withdraw_signals(Fixed())
