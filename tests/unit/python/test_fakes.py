"""The stand-ins in tests/fakes/native.py have the members and parameters of `_C.pyi`."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path
from typing import Any

import pytest

import reft
from tests.fakes import native

STUB = ast.parse(Path(reft.__file__).with_name("_C.pyi").read_text(encoding="utf-8"))
CLASSES = {node.name: node for node in STUB.body if isinstance(node, ast.ClassDef)}
# What only tests ask a stand-in.
EXTRA = {"notes"}


def members(stub: ast.ClassDef) -> dict[str, ast.FunctionDef]:
    return {node.name: node for node in stub.body if isinstance(node, ast.FunctionDef)}


def parameters(node: ast.FunctionDef) -> list[str]:
    return [argument.arg for argument in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)][
        1:
    ]


@pytest.mark.parametrize("name", sorted(native.CLASSES))
def test_a_stand_in_has_the_members_of_the_real_class(name: str) -> None:
    fake: type[Any] = native.CLASSES[name]
    public = {member for member in vars(fake) if not member.startswith("_")} - EXTRA
    assert public == {member for member in members(CLASSES[name]) if not member.startswith("_")}


@pytest.mark.parametrize("name", sorted(native.CLASSES))
def test_a_stand_in_takes_the_parameters_of_the_real_class(name: str) -> None:
    for member, node in members(CLASSES[name]).items():
        own = inspect.getattr_static(native.CLASSES[name], member)
        is_property = any(
            isinstance(d, ast.Name) and d.id == "property" for d in node.decorator_list
        )
        assert isinstance(own, property) == is_property, f"{name}.{member}"
        if is_property or (name, member) == ("Rank", "__init__"):
            continue
        assert list(inspect.signature(own).parameters)[1:] == parameters(node), f"{name}.{member}"


def test_the_engine_is_made_with_the_parameters_of_the_real_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:

    from reft import _C
    from reft._session.session import Session
    from tests.support.jobs import agreed, trusted

    made = native.FakeNative().install(monkeypatch)
    session = Session(_C.environment(), agreed(), trusted(), 1)
    try:
        session.start()
        wanted = parameters(members(CLASSES["Rank"])["__init__"])
        assert sorted(made.engine.options) == sorted(wanted)
    finally:
        session.stop(at_exit=False)
