"""Pickles in vaults and in the job's store: only names that make values are resolved."""

from __future__ import annotations

import collections
import datetime
import os
import pickle
import pickletools
import sys
import types
from collections.abc import Iterator
from os import system as imported_by_this_module
from typing import Any

import numpy
import pytest
import torch

from reft._continuation import nodes, plain
from reft._session import small_state
from reft._state import discovery, names, object_pickles


class Own:
    """A class of the script."""

    class Inner:
        pass

    def __init__(self) -> None:
        self.value = torch.ones(2)


def own_function() -> None:
    pass


def call_of(module: str, name: str, *arguments: str) -> bytes:
    """A pickle that calls a function by its name."""
    words = b"".join(b"V" + text.encode() + b"\n" for text in arguments)
    pair = b"".join(pickle.SHORT_BINUNICODE + bytes([len(t)]) + t.encode() for t in (module, name))
    return b"\x80\x04" + pair + b"\x93(" + words + b"tR."


@pytest.fixture(autouse=True)
def script(monkeypatch: pytest.MonkeyPatch) -> Iterator[types.ModuleType]:
    """This module is one of the script's."""
    module = sys.modules[__name__]
    assert module.__file__ is not None and "site-packages" not in module.__file__
    yield module


FORGED = [
    ("os", "system", "echo ran >&2; kill -9 $PPID"),
    ("posix", "system", "echo ran"),
    ("builtins", "eval", "1"),
    ("builtins", "getattr", "a"),
    ("builtins", "print", "ran"),
    ("uuid", "os.system", "echo ran"),
    ("pathlib", "os.system", "echo ran"),
    ("numpy", "os.system", "echo ran"),
    ("collections", "_sys.modules.get", "os"),
    ("torch.storage", "_load_from_bytes", "x"),
    ("torch", "load", "x"),
    ("torch", "hub.load", "x"),
    ("reft._state.object_pickles", "loads", "x"),
    ("subprocess", "Popen", "true"),
    (__name__, "imported_by_this_module", "echo ran"),
    (__name__, "os.system", "echo ran"),
    (__name__, "Own.Inner"),
    ("not_imported_yet", "anything"),
]


@pytest.mark.parametrize("name", FORGED, ids=lambda name: ".".join(name[:2]))
def test_no_other_name_is_resolved(name: tuple[str, ...]) -> None:
    data = call_of(*name)
    assert len(list(pickletools.genops(data))) > 3  # it is a pickle
    with pytest.raises(pickle.UnpicklingError):
        object_pickles.loads(data, lambda *_: None)
    everything = (names.VALUES, names.ARRAYS, names.MASKED_ARRAYS, names.CONTAINERS, plain.TENSORS)
    with pytest.raises(pickle.UnpicklingError):
        plain.loads(data, *everything)
    assert imported_by_this_module is os.system


def test_forged_state_of_a_scheduler_costs_that_scheduler_alone() -> None:
    """Before, `contents` read such a pickle with `pickle.Unpickler` itself."""
    good = object_pickles.dumps({"last_epoch": 3}, {})
    saved: Any = {
        "plain_state": [],
        "schedulers": [("StepLR", call_of("os", "system", "false")), ("StepLR", good)],
        "scalers": [],
        "strided": {},
        "registered": {},
    }
    opened = small_state.opened(saved, small_state.finder_in(discovery.State()))
    (_, bad), (_, kept) = opened["schedulers"]
    assert isinstance(bad, small_state.Unreadable) and "os.system" in bad.why
    assert kept == {"last_epoch": 3}


def test_what_scripts_keep_comes_back() -> None:
    own = Own()
    values = {
        "settings": {"lr": 0.1, "steps": collections.Counter({10: 1}), "betas": (0.9, 0.99)},
        "when": datetime.datetime(2026, 1, 2, tzinfo=datetime.UTC),
        "array": numpy.arange(4.0),
        "scalar": numpy.float64(0.5),
        "generator": numpy.random.default_rng(3),
        "torch": [torch.float32, torch.Size([2]), torch.device("cpu"), torch.channels_last],
        "tensor": torch.arange(6).reshape(2, 3).t(),
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "sparse": torch.eye(2).to_sparse(),
        "own": own,
        "class": Own,
        "function": own_function,
    }
    back = object_pickles.loads(object_pickles.dumps(values, {}), lambda *_: None)
    for name in ("settings", "when", "scalar", "torch", "class", "function"):
        assert back[name] == values[name], name
    assert numpy.array_equal(back["array"], numpy.arange(4.0))
    assert back["generator"].bit_generator.state == numpy.random.default_rng(3).bit_generator.state
    assert torch.equal(back["tensor"], torch.arange(6).reshape(2, 3).t())
    assert isinstance(back["parameter"], torch.nn.Parameter)
    assert torch.equal(back["sparse"].to_dense(), torch.eye(2))
    assert type(back["own"]) is Own and torch.equal(back["own"].value, own.value)


def test_what_would_not_be_read_back_is_not_written() -> None:
    """So that it is reported before a restart needs it."""
    for value in (os.system, Own.Inner(), pickle.Unpickler, types.MethodType(print, 1)):
        with pytest.raises((pickle.PicklingError, TypeError, AttributeError)):
            object_pickles.dumps([value], {})


def test_a_package_is_read_if_the_script_tells_torch_so() -> None:
    import fractions
    import string

    with pytest.raises(pickle.PicklingError, match="add_safe_globals"):
        object_pickles.dumps(string.Template("x"), {})
    with torch.serialization.safe_globals([string.Template]):
        data = object_pickles.dumps(string.Template("x"), {})
        assert object_pickles.loads(data, lambda *_: None).template == "x"
    with pytest.raises(pickle.UnpicklingError):
        object_pickles.loads(data, lambda *_: None)
    third = fractions.Fraction(1, 3)
    assert object_pickles.loads(object_pickles.dumps(third, {}), lambda *_: None) == third


def test_a_member_of_an_enumeration_calls_no_other_class() -> None:
    forged = nodes.Graph.unpacked(([None], ["subprocess.Popen"], [("EnumMember", None, ["false"])]))
    problems: list[str] = []

    class Walk:
        def problem(self, at: nodes.At, why: str) -> Any:
            problems.append(why)
            return nodes.KEEP

    at = nodes.At(0, forged.births[0], forged.types[0], "loop:x")
    assert forged.nodes[0].restore(at, nodes.MISSING, Walk()) is nodes.KEEP  # type: ignore[arg-type]
    assert problems
