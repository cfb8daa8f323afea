"""docs/environment.md is what the environment table says."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler")
def test_environment_page_is_current() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "gen_env_docs"), "--check"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
