"""Pickles of plain values: a closed list of names, and nothing that leads out of it."""

from __future__ import annotations

import collections
import datetime
import decimal
import fractions
import os
import pathlib
import pickle
import uuid
import zoneinfo
from typing import Any

import pytest

torch = pytest.importorskip("torch")
numpy = pytest.importorskip("numpy")

from reft._continuation import plain, rng  # noqa: E402
from reft._continuation.kinds.containers import List  # noqa: E402
from reft._continuation.kinds.objects import PENDING, Lost  # noqa: E402
from reft._continuation.nodes import (  # noqa: E402
    _KINDS,
    KEEP,
    UNBOUND,
    Graph,
    handle,
    handle_in,
    index_of,
    ref,
)
from reft._state import names  # noqa: E402

ALL = (
    names.VALUES,
    names.ARRAYS,
    names.MASKED_ARRAYS,
    names.CONTAINERS,
    plain.TENSORS,
)


def calling(module: str, name: str) -> bytes:
    """A pickle, written by hand, that calls a name of a module with the word `true`."""
    parts = [b"\x80\x04", b"\x8c", bytes([len(module)]), module.encode()]
    parts += [b"\x8c", bytes([len(name)]), name.encode(), b"\x93"]  # STACK_GLOBAL
    return b"".join([*parts, b"\x8c\x04true", b"\x85R."])


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("os", "system"),
        ("posix", "system"),
        ("builtins", "eval"),
        ("builtins", "getattr"),
        ("uuid", "os.system"),  # a dotted name leads out of a module that is on the list
        ("uuid", "os"),
        ("pathlib", "os.system"),
        ("pathlib", "PosixPath.__init__"),
        ("decimal", "Decimal.from_float"),
        ("datetime", "sys.modules"),
        ("numpy", "f2py.os.system"),
        ("numpy", "load"),
        ("numpy", "os.system"),
        ("numpy.testing", "rundocs"),
        ("_codecs", "encode"),
        ("torch.storage", "_load_from_bytes"),
        ("torch", "load"),
        ("collections", "_sys.modules"),
        ("reft._continuation.plain", "loads"),
        ("reft._continuation.plain", "pickle.loads"),
        ("reft._continuation.kinds.containers", "List"),
        ("datetime.date", "today"),
        ("", "system"),
    ],
)
def test_a_name_that_is_not_on_the_list_is_refused(module: str, name: str) -> None:
    data = calling(module, name)
    for lists in [(), *((one,) for one in ALL), ALL]:
        with pytest.raises(pickle.UnpicklingError, match="is not a plain value"):
            plain.loads(data, *lists)


def test_the_hand_written_pickle_is_one() -> None:
    assert pickle.loads(calling("os.path", "basename")) == "true"


def test_a_class_with_a_reduce_of_its_own_is_refused() -> None:
    class Trap:
        def __reduce__(self) -> Any:
            return os.getpid, ()

    with pytest.raises(pickle.UnpicklingError, match=r"posix\.getpid"):
        plain.loads(pickle.dumps({"a": [Trap()]}), *ALL)
    with pytest.raises(pickle.PicklingError, match="Trap"):
        plain.dumps({"a": [Trap()]}, *ALL)


def test_no_list_has_a_dotted_name() -> None:
    assert [pair for one in ALL for pair in one if "." in pair[1] or "__" in pair[1]] == []


@pytest.mark.parametrize(
    "value",
    [
        datetime.datetime(2026, 2, 3, tzinfo=datetime.timezone(datetime.timedelta(hours=2))),
        datetime.datetime(2026, 2, 3, tzinfo=zoneinfo.ZoneInfo("UTC")),
        datetime.timedelta(3),
        decimal.Decimal("0.1"),
        fractions.Fraction(1, 3),
        uuid.UUID(int=7),
        pathlib.Path("a/b"),
        pathlib.PurePosixPath("a"),
        slice(1, 2),
        range(4),
        [1j, ..., (b"x", {"y": {1, 2}})],
    ],
    ids=repr,
)
def test_values_come_back(value: Any) -> None:
    assert plain.loads(plain.dumps(value, names.VALUES)) == value


def test_a_decimal_context_comes_back() -> None:
    context = decimal.Context(prec=5, traps=[decimal.Inexact])
    back = plain.loads(plain.dumps(context, names.VALUES))
    assert (back.prec, back.traps[decimal.Inexact]) == (5, True)


def test_containers_of_tensors_and_arrays_come_back_with_their_aliases() -> None:
    row = [1, 2]
    value = collections.deque([row, row, {"t": torch.arange(6.0).reshape(2, 3)[:, 1:]}])
    value.append(collections.defaultdict(list, {"a": numpy.arange(4).reshape(2, 2)}))
    value.append(torch.empty(0, dtype=torch.int32))
    back = plain.loads(plain.dumps(value, *ALL), *ALL)
    assert back[0] is back[1]
    assert back[2]["t"].tolist() == value[2]["t"].tolist()
    assert back[3]["a"].tolist() == [[0, 1], [2, 3]]
    assert back[3].default_factory is list
    assert back[4].dtype is torch.int32


def test_a_tensor_of_an_unknown_dtype_is_refused() -> None:
    with pytest.raises(pickle.UnpicklingError, match="dtype"):
        plain.tensor_of("load", (1,), b"\0" * 4)


def test_generators_of_numpy_come_back() -> None:
    for made in (numpy.random.default_rng(3), numpy.random.RandomState(3)):
        kind = f"{type(made).__module__}.{type(made).__qualname__}"
        back = rng.new_object(kind, rng.object_state(made))
        assert back.normal(size=3).tolist() == made.normal(size=3).tolist()


def test_a_graph_travels_without_the_name_of_a_class() -> None:
    graph = Graph([List([ref(1), 2, KEEP], []), Lost("why")], ["main:a", None], ["a.A", "b.B"])
    data = pickle.dumps(graph.packed(), protocol=5)
    assert b"reft" not in data
    back = Graph.unpacked(plain.loads(data))
    assert (back.births, back.types) == (graph.births, graph.types)
    first, second = back.nodes
    assert isinstance(first, List)
    assert first.items == [ref(1), 2, KEEP]
    assert isinstance(second, Lost)
    assert second.reason == "why"
    assert back.node(first.items[0]) is second


@pytest.mark.parametrize(
    "packed",
    [
        ([None], ["x"], [("Unknown", 1)]),
        ([None], ["x"], [("List", 1)]),
        ([], ["x"], [("Lost", "why")]),
    ],
)
def test_a_graph_of_another_version_is_refused(packed: Any) -> None:
    with pytest.raises(pickle.UnpicklingError):
        Graph.unpacked(packed)


def test_marks_cannot_be_taken_for_each_other() -> None:
    assert index_of(ref(3)) == 3
    assert handle_in(handle((3, 4))) == (3, 4)
    assert [index_of(value) for value in (KEEP, UNBOUND, handle(3), 3, "r", None)] == [None] * 6


def test_every_kind_restores() -> None:
    for kind in _KINDS.values():
        assert "restore" in vars(kind), kind
    assert PENDING.tag in _KINDS
