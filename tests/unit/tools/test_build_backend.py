"""`pip install .` where there is no torch: the build asks for one, where the environment can be seen."""

from __future__ import annotations

import runpy
import sys
import sysconfig
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

CMAKE = Path(__file__).resolve().parents[3] / "cmake"
OVERLAY = "/tmp/pip-build-env-x/overlay/lib/python3/site-packages"  # where pip puts requirements


def requires(monkeypatch: pytest.MonkeyPatch, torch: str, packages: str) -> list[str]:
    backend: Any = ModuleType("scikit_build_core.build")
    backend.__file__ = f"{packages}/scikit_build_core/build/__init__.py"
    for name in ("build_editable", "build_sdist", "build_wheel"):
        setattr(backend, name, None)
    for name in ("wheel", "editable"):
        setattr(backend, f"prepare_metadata_for_build_{name}", None)
    for name in ("wheel", "editable", "sdist"):
        setattr(backend, f"get_requires_for_build_{name}", lambda settings: ["ninja"])
    package: Any = ModuleType("scikit_build_core")
    package.build = backend
    requirement: Any = ModuleType("torch_requirement")
    requirement.missing_torch = lambda: [torch] if torch else []
    for module in (package, backend, requirement):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    hooks = runpy.run_path(str(CMAKE / "build_backend.py"))
    wheel, editable = (
        hooks[f"get_requires_for_build_{kind}"](None) for kind in ("wheel", "editable")
    )
    assert wheel == editable
    return list(wheel)


def test_torch_is_asked_for_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    assert requires(monkeypatch, "torch>=2.11,<2.12", OVERLAY) == ["ninja", "torch>=2.11,<2.12"]


def test_the_torch_that_is_there_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    assert requires(monkeypatch, "", OVERLAY) == ["ninja"]


def test_an_environment_that_is_hidden_may_have_another_torch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    packages = sysconfig.get_path("purelib")
    assert requires(monkeypatch, "torch>=2.11,<2.12", packages) == ["ninja"]


def test_no_torch_is_missing_here() -> None:
    provider: dict[str, Any] = runpy.run_path(str(CMAKE / "torch_requirement.py"))
    assert provider["missing_torch"]() == []
