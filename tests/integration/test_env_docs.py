"""docs/environment.md is what the environment table says, and what the code does."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from reft._link import job_identity

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


def test_the_page_names_what_the_default_run_directory_comes_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (ROOT / "docs" / "environment.md").read_text()
    (row,) = [line for line in page.splitlines() if line.startswith("| `REFT_RUN_DIR` ")]
    monkeypatch.setattr(tempfile, "tempdir", None)  # chosen again
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    env = {"XDG_RUNTIME_DIR": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "cache")}

    def place() -> str:
        return f"{job_identity.default_run_dir(env).relative_to(tmp_path)}"

    assert place() == "reft" and "`$XDG_RUNTIME_DIR/reft`" in row
    del env["XDG_RUNTIME_DIR"]
    assert place() == f"reft-{os.getuid()}" and "`$TMPDIR/reft-<uid>`" in row
    (tmp_path / f"reft-{os.getuid()}").write_text("")  # taken
    assert place().startswith("cache/reft/run-") and "`$XDG_CACHE_HOME/reft/run-<boot id>`" in row
