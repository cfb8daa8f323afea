"""What a wheel of reft depends on: torch of the minor that its binaries are built for, and what
pyproject.toml lists as `others`.

scikit-build-core asks for it while it builds. It finds the torch that torch.cmake finds, but reads
its version without an import.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

PINNED = "2.11"  # of a source distribution, and where no torch is found


def dynamic_metadata(
    settings: Mapping[str, Any], project: Mapping[str, Any]
) -> dict[str, list[str]]:
    return {"dependencies": [requirement(torch_version()), *settings["others"]]}


def requirement(version: str) -> str:
    """What fits binaries built for this version: '2.11.0+cpu' → 'torch>=2.11,<2.12'."""
    found = re.match(r"(\d+)\.(\d+)(.*)", version.partition("+")[0])
    major, minor, rest = found.groups() if found else (*PINNED.split("."), "")
    # Nightly builds come before the release of their number.
    lowest = f"{major}.{minor}.dev0" if re.search(r"dev|a|b|rc", rest) else f"{major}.{minor}"
    return f"torch>={lowest},<{major}.{int(minor) + 1}"


def missing_torch() -> list[str]:
    """What to build with where no torch is found; nothing where one is."""
    return [] if _found() else [requirement(PINNED)]


def torch_version() -> str:
    return _found() or PINNED


def _found() -> str:
    """Returns the version of the installed torch, or ""."""
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        pass
    # pip builds in an isolated environment, which it makes by PYTHONPATH: look into the one that
    # reft is installed into.
    hidden = ("PYTHONPATH", "PYTHONNOUSERSITE")
    asked = subprocess.run(
        [sys.executable, "-c", "from importlib.metadata import version; print(version('torch'))"],
        env={name: value for name, value in os.environ.items() if name not in hidden},
        capture_output=True,
        text=True,
        check=False,
    )
    return asked.stdout.strip()
