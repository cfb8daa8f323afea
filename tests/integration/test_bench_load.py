"""The benchmark of loads runs, and what it restores and loads has the right bytes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.launchers import job_environment

BENCH = Path(__file__).resolve().parents[1] / "bench" / "load.py"


@pytest.mark.slow
def test_a_lost_vault_comes_back_from_copies_and_from_parities(folder: Path) -> None:
    """Its ranks compare all bytes after each restore and each load, and fail if one differs."""
    size = ["--state-mb", "26", "--repeats", "1", "--rounds", "1"]
    command = [sys.executable, str(BENCH), *size, "--json", str(folder / "found.json")]
    environment = job_environment(folder)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    found = json.loads((folder / "found.json").read_text())
    ways = {"restore", "after_loss", "storage", "cached", "memcpy"}
    assert {name: set(took) for name, took in found["seconds"].items()} == {
        "arc": ways,
        "aec": ways,
    }
    assert all(metric["value"] > 0 for metric in found["metrics"].values())
