"""Creating the backend: what else fails never prevents a group, unless REFT_STRICT=1."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

import reft_autoload
from reft import _C, _voice
from reft._session import current
from reft._torch import backend, patches

Create = Callable[..., Any]


class Made:
    """What a backend was made of."""

    def __init__(self, *parts: Any) -> None:
        self.cpu, self.cuda, self.store, self.prefix, self.group, self.rank, self.size = parts[:7]
        self.make_cpu = parts[7]


@pytest.fixture
def create(monkeypatch: pytest.MonkeyPatch) -> Iterator[Create]:
    """Creates a backend of one rank without gloo; `create(ranks=[0])`: not the default group."""
    monkeypatch.setattr(backend._C, "ReftBackend", Made)
    monkeypatch.setattr(backend, "_make_gloo", lambda *_: "gloo")
    monkeypatch.setattr(backend, "_once", lambda: None)
    monkeypatch.setattr(backend, "_prefix", backend._Prefix())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    def make(store: Any = None, ranks: list[int] | None = None) -> Any:
        options = SimpleNamespace(
            store=store or dist.HashStore(),
            group_rank=0,
            group_size=1,
            timeout=timedelta(seconds=5),
            group_id="7",
            global_ranks_in_group=ranks or [],
        )
        return backend.create_backend(options, None)

    yield make


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """(rank, size) of each session that was started."""
    found: list[tuple[int, int]] = []
    monkeypatch.setattr(
        current, "on_default_group", lambda store, rank, size: found.append((rank, size))
    )
    return found


def test_the_default_group_starts_a_session(create: Create, started: list[Any]) -> None:
    made = create()
    assert (made.cpu, made.cuda, made.group, made.rank, made.size) == ("gloo", None, "7", 0, 1)
    assert started == [(0, 1)]


def test_other_groups_use_the_keys_of_the_default_group(create: Create, started: list[Any]) -> None:
    default, other = create(), create(ranks=[0])
    assert other.prefix == default.prefix and started == [(0, 1)]
    assert create().prefix != default.prefix, "a new default group is a new attempt"


def test_a_group_under_another_default_group_agrees_for_itself(
    create: Create, started: list[Any]
) -> None:
    one, two = create(ranks=[0]), create(ranks=[0])
    assert one.prefix != two.prefix and started == []


def test_stale_signals_are_withdrawn_by_default_groups(create: Create, started: list[Any]) -> None:
    store = dist.HashStore()
    store.set("exception_dump", "1")
    create(store, ranks=[0])
    assert store.check(["exception_dump"])
    create(store)
    assert not store.check(["exception_dump"])


def test_a_session_that_fails_leaves_a_working_group(
    create: Create, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: Any) -> None:
        raise ValueError("odd")

    monkeypatch.setattr(current, "on_default_group", fail)
    assert create().cpu == "gloo"
    assert capsys.readouterr().err == (
        "reft: warning: rank 0: training continues without snapshots and hang detection: odd\n"
    )


def test_strict_raises_what_a_session_raises(
    create: Create, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise ValueError("odd")

    monkeypatch.setattr(current, "on_default_group", fail)
    monkeypatch.setenv("REFT_STRICT", "1")
    with pytest.raises(ValueError, match="odd"):
        create()


def test_the_timeout_of_nccl_is_its_own_default(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[timedelta] = []

    class Nccl:
        class Options:
            pass

        def __init__(self, store: Any, rank: int, size: int, options: Any) -> None:
            seen.append(options._timeout)

        def _set_sequence_number_for_group(self) -> None:
            pass

    monkeypatch.setattr(backend, "_BUILTIN_PLUGINS", False)
    monkeypatch.setattr(c10d, "ProcessGroupNCCL", Nccl, raising=False)
    monkeypatch.setattr(c10d, "default_pg_nccl_timeout", timedelta(minutes=10), raising=False)
    options = SimpleNamespace(group_rank=0, group_size=1, global_ranks_in_group=[], group_id="0")
    backend._make_nccl(options, None, None, c10d.default_pg_timeout)
    backend._make_nccl(options, None, None, timedelta(seconds=9))
    assert seen == [timedelta(minutes=10), timedelta(seconds=9)]


@pytest.mark.parametrize(
    ("setting", "problem", "armed", "warned"),
    [
        ("off", "", [], []),
        ("on", "", [False], []),
        ("kernels", "", [True], []),
        ("on", "taken", [False], ["REFT_NCCL_PROFILER=on has no effect: taken"]),
    ],
)
def test_the_profiler_plugin_follows_its_setting(
    monkeypatch: pytest.MonkeyPatch,
    setting: str,
    problem: str,
    armed: list[bool],
    warned: list[str],
) -> None:
    calls: list[bool] = []
    warnings: list[str] = []

    def arm(kernels: bool) -> str:
        calls.append(kernels)
        return problem

    monkeypatch.setenv("REFT_NCCL_PROFILER", setting)
    monkeypatch.setattr(_C, "arm_nccl_profiler", arm)
    monkeypatch.setattr(_voice, "warn", warnings.append)
    backend._follow_nccl.__wrapped__()
    assert calls == armed
    assert warnings == warned


# -- patches


def test_a_patch_is_applied_once_and_wherever_the_function_is_known() -> None:
    def original() -> str:
        return "original"

    owner, other, unrelated = (ModuleType(name) for name in "abc")
    owner.f = other.f = original  # type: ignore[attr-defined]
    unrelated.f = lambda: "own"  # type: ignore[attr-defined]
    for _ in range(2):
        patches._wrap(owner, "f", lambda f: lambda: f"patched {f()}", other, unrelated)
    assert owner.f() == other.f() == "patched original"  # type: ignore[attr-defined]
    assert unrelated.f() == "own"  # type: ignore[attr-defined]
    patches._wrap(owner, "missing", lambda f: f)
    assert not hasattr(owner, "missing")


def test_groups_of_other_backends_have_no_backend_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    class Group(c10d.ProcessGroup):
        _device_types = (torch.device("cpu"), torch.device("meta"))

        def __init__(self) -> None:
            super().__init__(0, 1)

        def _get_backend(self, device: Any) -> Any:
            if device.type == "meta":
                raise RuntimeError("none for it")
            return SimpleNamespace(name="gloo")

    assert patches.backend_of(Group()) is None
    assert patches.backend_of(SimpleNamespace()) is None


# -- the creator that torch calls


def test_an_old_torch_is_refused_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.10.1")
    with pytest.raises(
        RuntimeError, match=r"needs torch 2.11 or newer, this is 2.10.1.*REFT_DISABLE=1"
    ):
        reft_autoload._create(SimpleNamespace(), None)


def test_a_library_that_cannot_be_loaded_is_refused_with_a_remedy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "reft._torch.backend", None)
    monkeypatch.delattr(sys.modules["reft._torch"], "backend")
    with pytest.raises(RuntimeError, match="cannot load its native library .* Install it again"):
        reft_autoload._create(SimpleNamespace(), None)


def test_a_library_for_another_torch_is_refused_with_a_remedy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    monkeypatch.setattr(backend._C, "torch_version", "2.98.1")
    with pytest.raises(
        RuntimeError, match=r"was built for torch 2.98, this is 2.99.0. Install it again"
    ):
        reft_autoload._create(SimpleNamespace(), None)


def test_disabled_late_is_plain_gloo(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("REFT_DISABLE", "1")
    made: list[Any] = []
    monkeypatch.setattr(c10d, "ProcessGroupGloo", lambda *a, **k: made.append((a, k)) or "plain")
    options = SimpleNamespace(store=1, group_rank=2, group_size=3, timeout=4)
    assert reft_autoload._create(options, None) == "plain"
    assert made == [((1, 2, 3), {"timeout": 4})]
    assert "REFT_DISABLE=1 was set after torch was imported" in capsys.readouterr().err


def test_disabled_before_torch_the_name_stands_for_torchs_own() -> None:
    seen: list[str] = []

    class Config:
        def __init__(self, backend: Any) -> None:
            seen.append(str(backend))

    kinds = SimpleNamespace(NCCL="kind nccl", GLOO="kind gloo")
    fake = SimpleNamespace(
        BackendConfig=Config,
        ProcessGroup=SimpleNamespace(BackendType=kinds),
        Backend=SimpleNamespace(backend_type_map={}),
        is_nccl_available=lambda: False,
    )
    reft_autoload._resolve_to_plain(fake)
    for name in ("REFT", "cpu:reft,cuda:reft", "cpu:gloo,cuda:reft", "mpi"):
        Config(name)
    assert seen == ["gloo", "cpu:gloo,cuda:nccl", "cpu:gloo,cuda:nccl", "mpi"]
    assert fake.Backend.backend_type_map == {"reft": "kind gloo"}
