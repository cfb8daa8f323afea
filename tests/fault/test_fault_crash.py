"""The short form of the crash campaign: one death of each way that reft sees it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("reft._C", reason="needs the native module")

ROOT = Path(__file__).resolve().parents[2]
DEATHS = ["forward", "data_worker_exception", "segv", "os_exit", "killed", "own_hook", "abort"]


def test_the_first_that_fails_is_named(tmp_path: Path) -> None:
    out = tmp_path / "crash.json"
    command = [sys.executable, "-m", "tests.fault.crash_campaign", "--most-ranks", "3", "--cases", str(len(DEATHS)),
               "--deaths", *DEATHS, "--json", str(out), "--keep", str(tmp_path / "cases")]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    metrics = json.loads(out.read_text())["metrics"]
    assert metrics["exact"]["value"] == len(DEATHS), done.stdout
    assert metrics["unshown"]["value"] == 0, done.stdout
