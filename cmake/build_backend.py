"""scikit-build-core, which also asks for torch where the environment that reft is installed into has
none: `pip install .` then works in an empty one.

That can be known under pip alone: it builds with the Python of that environment. `uv` and
`python -m build` build with another one; there, CMake says what to do.
"""

from __future__ import annotations

import sysconfig
from pathlib import Path
from typing import Any

import scikit_build_core.build as backend
from scikit_build_core.build import (
    build_editable,
    build_sdist,
    build_wheel,
    get_requires_for_build_sdist,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)
from torch_requirement import missing_torch

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]


def get_requires_for_build_wheel(settings: dict[str, Any] | None = None) -> list[str]:
    return [*backend.get_requires_for_build_wheel(settings), *_torch()]


def get_requires_for_build_editable(settings: dict[str, Any] | None = None) -> list[str]:
    return [*backend.get_requires_for_build_editable(settings), *_torch()]


def _torch() -> list[str]:
    # pip lays the build requirements over the environment; they are no part of it.
    packages = Path(sysconfig.get_path("purelib"))
    sees_environment = not Path(str(backend.__file__)).is_relative_to(packages)
    return missing_torch() if sees_environment else []
