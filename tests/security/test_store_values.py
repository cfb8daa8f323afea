"""Every process that reaches the job's store can write to it. What no rank of this attempt has
written counts as absent: no code, no crash, no wrong result, and it is counted."""

from __future__ import annotations

import json
import os
import pickle
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from reft import _C
from reft._link import agreement, gather, trusted_store
from reft._link.trusted_store import TrustedStore, Untrusted
from reft._session import startup
from reft._state import replica_groups
from reft._state.discovery import Region
from tests.support.jobs import job, trusted

DEEP = b"[" * 200_000
HUGE = b"[" + b"0," * (4 << 20) + b"0]"
BEFORE = "the attempt before"

Read = Callable[[TrustedStore], Any]


class Bomb:
    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.file}",)


class Plan:
    """Rank 1 is on another node, so its small state comes through the store from rank 0."""

    def owner(self, rank: int) -> int:
        return rank

    def is_near(self, owner: int, rank: int) -> bool:
        return False

    def reader(self, owner: int) -> int:
        return 0


class Restorer:
    def put_table(self, table: str) -> None:
        json.loads(table)


def small_state(store: TrustedStore) -> Any:
    return startup._small_state(job(1, 2, 1), store, Plan(), Restorer())  # type: ignore[arg-type]


def gathered(key: str, publisher: int, ranks: int) -> Read:
    return lambda store: gather._Reader(store, 16 << 10)(key, publisher, ranks)


# Key, kind and publisher of every value that Python reads out of the store, and what reads it.
READS: dict[str, tuple[str, int, Read]] = {
    "round/3": ("round", 3, gathered("round/3", 3, 1)),
    "round/node/1": ("round", 2, gathered("round/node/1", 2, 2)),
    "round/job": ("round", 0, gathered("round/job", 0, 4)),
    "agent/0": (
        "agent",
        0,
        lambda store: startup.connect({"connect_sec": 1}, job(1, 2), store, "{}"),
    ),
    "table/1": ("table", 0, small_state),
    "objects/1": ("objects", 0, small_state),
}


def forgeries(key: str, kind: str, publisher: int, payload: bytes) -> dict[str, bytes]:
    """What an outsider can write, who has seen all that ranks wrote in all attempts."""
    store = trusted()

    def sealed(by: TrustedStore, where: str = key, rank: int = publisher, what: str = kind) -> bytes:
        by.put(what, where, rank, payload)
        return bytes(by.raw.get(where))

    right = sealed(store)
    return {
        "bare": payload,
        "deep": DEEP,
        "huge": HUGE,
        "empty": b"",
        "short": right[:20],
        "wrong MAC": right[:20] + bytes(28) + right[48:],
        "changed": right[:-1] + bytes([right[-1] ^ 1]),
        "longer": right + b"x",
        "of an earlier attempt": sealed(trusted(attempt=BEFORE)),
        "of another job": sealed(trusted(secret=b"x" * 32)),
        "of another key": sealed(store, where=f"{key}0"),
        "of another rank": sealed(store, rank=publisher + 1),
        "of another kind": sealed(store, what="replicas"),
    }


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trusted_store, "_PATIENCE_SEC", 0.0)


@pytest.mark.parametrize("key", READS)
def test_what_an_outsider_writes_is_not_read(key: str, tmp_path: Path) -> None:
    kind, publisher, read = READS[key]
    mark = tmp_path / "ran"
    for name, value in forgeries(key, kind, publisher, pickle.dumps(Bomb(mark))).items():
        store = trusted()
        store.raw.set_timeout(timedelta(seconds=0.5))
        store.put("table", "table/1", 0, "{}")
        store.raw.set(key, value)
        before = _C.ValueSeal.refused()
        with pytest.raises(Untrusted, match=key):
            read(store)
        assert _C.ValueSeal.refused() > before, name
    assert not mark.exists()


def test_the_right_value_counts_although_a_foreign_one_was_there_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In a round of all ranks, with an outsider that writes under the keys of all."""
    monkeypatch.setattr(trusted_store, "_PATIENCE_SEC", 60.0)
    store = trusted()
    for key in ("identity/0", "identity/1", "identity/2", "identity/node/0", "identity/job"):
        store.raw.set(key, DEEP)
    settings = {"run_dir": "/run/reft", "job_id": "job", "snapshot_overhead_percent": 0, "snapshot_protection": "none"}
    with ThreadPoolExecutor(3) as pool:
        calls = [pool.submit(agreement.agree, store, rank, 3, settings) for rank in range(3)]
        agreed = [call.result(60) for call in calls]
    assert [refusals for _, refusals in agreed] == [{}] * 3
    assert len({one.incarnation for one, _ in agreed if one is not None}) == 1


def test_small_state_is_that_of_the_rank_that_reads_the_vault() -> None:
    store = trusted()
    store.put("table", "table/1", 0, "{}")
    store.put("objects", "objects/1", 0, b"small state")
    assert small_state(store) == b"small state"


# -- replica groups


def confirmed(store: TrustedStore, values: list[float]) -> list[bool]:
    """Whether each rank found the tensor equal on all."""

    def confirm(rank: int) -> bool:
        region = Region("o0.p0", torch.full((4,), values[rank]), (0, 1))
        groups, _ = replica_groups.confirm([region], store, rank, "first")
        return bool(groups)

    with ThreadPoolExecutor(len(values)) as pool:
        return list(pool.map(confirm, range(len(values))))


@pytest.mark.parametrize("value", [b"equal", DEEP, b"\xff\xfe"])
def test_nobody_declares_replicas_equal_from_outside(
    value: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks that share a tensor only in the store would each save a part of it."""
    monkeypatch.setattr(replica_groups, "_WAIT", timedelta(seconds=2))
    keys: list[str] = []

    class Known(dist.HashStore):
        def set(self, key: str, value: Any) -> None:
            keys.append(key)
            super().set(key, value)

    assert confirmed(trusted(Known()), [1, 1]) == [True, True]
    outcome = f"{keys[0].rpartition('/')[0]}/outcome"
    store = trusted()
    store.raw.set(outcome, value)
    assert confirmed(store, [1, 2]) == [False, False]
    digest = f"{keys[0].rpartition('/')[0]}/1"
    store = trusted()
    store.raw.set(digest, value)
    assert confirmed(store, [1, 1]) in ([True, True], [False, False]), "all or none"


@pytest.mark.parametrize("kind", ["hash", "file", "tcp"])
def test_a_key_that_an_outsider_removes_stops_no_rank(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`get` would wait for it as long as the store does: half an hour."""
    monkeypatch.setattr(trusted_store, "_PATIENCE_SEC", 0.1)
    raw = {
        "hash": dist.HashStore,
        "file": lambda: dist.FileStore(str(tmp_path / "store"), 1),
        "tcp": lambda: dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False),
    }[kind]()
    raw.set_timeout(timedelta(minutes=30))
    store = trusted(dist.PrefixStore("attempt", raw))
    store.put("round", "key", 0, "text")
    store.wait(["key"], timedelta(seconds=5))
    assert store.read("round", "key", 0, was_there=True) == b"text"
    assert store.found("round", "key", 64) == b"text"
    store.raw.delete_key("key")
    with pytest.raises(Untrusted):
        store.read("round", "key", 0, was_there=True)
    assert store.found("round", "key", 64) is None and not store.has("key")
    store.put_new("round", "key", 0, "text")
    assert store.read("round", "key", 0) == b"text"


def test_a_refusal_replaces_what_an_outsider_has_put_in_its_place() -> None:
    store = trusted()
    for key in ("round/0", "round/node/0", "round/job"):
        store.raw.set(key, b"node-0")
    gather.refuse(job(0, 2), store, "round", "no memory")
    gathered = gather.gather(job(1, 2), store, "round", "{}", gather.merge_by_rank)
    assert gathered.refusals == {0: "no memory"}


# -- a store that somebody else writes to all the time


def test_an_outsider_that_overwrites_everything_only_keeps_ranks_from_agreeing() -> None:
    store = trusted()
    store.raw.set_timeout(timedelta(seconds=20))
    overwritten, ended = threading.Event(), threading.Event()

    def overwrite() -> None:
        while not ended.is_set():
            for key in store.raw.list_keys():
                store.raw.set(key, DEEP)
            overwritten.set()

    outsider = threading.Thread(target=overwrite)
    settings = {"run_dir": "/run/reft", "job_id": "job", "snapshot_overhead_percent": 0, "snapshot_protection": "none"}
    store.put("round", "identity/1", 1, "{}")
    outsider.start()
    overwritten.wait(20)
    try:
        with pytest.raises(Untrusted):
            agreement.agree(store, 0, 2, settings)
    finally:
        ended.set()
        outsider.join()
