"""The CPythons of this machine, for tests that look at programs of each supported version."""

from __future__ import annotations

import functools
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

MINORS = [11, 12, 13]


@functools.cache
def interpreter(minor: int) -> str | None:
    """A CPython 3.`minor` that works."""
    name = f"python3.{minor}"
    candidates = [sys.executable] if sys.version_info[1] == minor else []
    candidates += map(str, (Path.home() / ".pyenv" / "versions").glob(f"3.{minor}.*/bin/{name}"))
    candidates += [shutil.which(name) or name]
    check = f"import sys; sys.exit(sys.implementation.name != 'cpython' or sys.version_info[:2] != (3, {minor}))"
    for candidate in candidates:
        try:
            subprocess.run([candidate, "-c", check], check=True, capture_output=True, timeout=60)
        except (OSError, subprocess.SubprocessError):
            continue
        return candidate
    return None


def need(minor: int) -> str:
    found = interpreter(minor)
    if found is None:
        pytest.skip(f"no CPython 3.{minor} here")
    return found
