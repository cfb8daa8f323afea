"""The torch that a wheel asks for: the minor that its binaries are built for."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

PROVIDER = Path(__file__).resolve().parents[3] / "cmake" / "torch_requirement.py"


@pytest.mark.parametrize(
    ("version", "wanted"),
    [
        ("2.11.0", "torch>=2.11,<2.12"),
        ("2.11.1+cpu", "torch>=2.11,<2.12"),
        ("2.12.0a0+git1234", "torch>=2.12.dev0,<2.13"),
        ("2.12.0.dev20260801+cu130", "torch>=2.12.dev0,<2.13"),
        ("2.12.0+abcdef", "torch>=2.12,<2.13"),
        ("", "torch>=2.11,<2.12"),
    ],
)
def test_one_minor_is_asked_for(version: str, wanted: str) -> None:
    provider: dict[str, Any] = runpy.run_path(str(PROVIDER))
    assert provider["requirement"](version) == wanted


def test_the_other_requirements_stand_in_pyproject() -> None:
    provider: dict[str, Any] = runpy.run_path(str(PROVIDER))
    found = provider["dynamic_metadata"]({"others": ["click>=8"]}, {})["dependencies"]
    assert found[0].startswith("torch>=") and found[1:] == ["click>=8"]
