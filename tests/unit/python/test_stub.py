"""The stub `_C.pyi` names what the native module has, and nothing else."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

pytest.importorskip("torch")
reft = pytest.importorskip("reft")
from reft import _C  # noqa: E402

STUB = Path(reft.__file__).with_name("_C.pyi")
# Forwarded to the inner backend by name, so that they are no attributes of the class.
FORWARDED = {"_get_sequence_number_for_group", "_set_sequence_number_for_group"}


def names_of(body: list[ast.stmt]) -> set[str]:
    found = {node.name for node in body if isinstance(node, (ast.ClassDef, ast.FunctionDef))}
    return found | {
        node.target.id
        for node in body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }


def test_the_stub_has_every_name() -> None:
    tree = ast.parse(STUB.read_text(encoding="utf-8"))
    assert names_of(tree.body) == {name for name in dir(_C) if not name.startswith("__")}
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and not issubclass(getattr(_C, node.name), Exception):
            members = {
                name
                for name in vars(getattr(_C, node.name))
                if not name.startswith(("__", "_pybind11"))
            }
            assert {
                n for n in names_of(node.body) if not n.startswith("__")
            } - FORWARDED == members, node.name
