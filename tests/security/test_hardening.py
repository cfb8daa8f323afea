"""The binaries that are installed have what makes an error in memory harder to use."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

pytest.importorskip("torch")
_C = pytest.importorskip("reft._C", reason="needs the native module")
PACKAGE = Path(_C.__file__).resolve().parent
TOOL = Path(__file__).resolve().parents[2] / "tools" / "check_hardening"


@pytest.mark.skipif(shutil.which("readelf") is None, reason="needs binutils")
def test_every_binary_is_hardened() -> None:
    done = subprocess.run([sys.executable, TOOL, PACKAGE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^reft-agent +(yes +){7}yes$", done.stdout, re.M), done.stdout


def test_the_package_asks_for_the_torch_that_it_is_built_for() -> None:
    minor = ".".join(_C.torch_version.split(".")[:2])
    (needed,) = (text for text in metadata.requires("reft") or [] if text.startswith("torch"))
    assert f">={minor}" in needed.replace(" ", "") and "<" in needed, needed
