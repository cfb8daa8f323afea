"""The device campaign's short form: who is named when a device does not come to an op."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fakes.cuda import environment as cuda

pytestmark = [
    pytest.mark.exact,
    pytest.mark.skipif(bool(cuda.missing()), reason=cuda.missing()),
]
CAMPAIGN = Path(__file__).resolve().parent / "device_campaign.py"
CASES = r"^(H50 (ddp|pipe|inner) 3 r1|H52 event 3 r2|H51 .*)$"


@pytest.mark.timeout(600)
def test_device_campaign(tmp_path: Path) -> None:
    result = tmp_path / "device.json"
    done = subprocess.run(
        [sys.executable, str(CAMPAIGN), "--ranks", "3", "--only", CASES, "--json", str(result)],
        capture_output=True, text=True,
    )  # fmt: skip
    said = done.stdout[-8000:] + done.stderr[-2000:]
    assert done.returncode == 0, said
    written = json.loads(result.read_text())
    metrics = {name: metric["value"] for name, metric in written["metrics"].items()}
    assert written["cases"]["run"] == 5, said
    assert (metrics["exact"], metrics["silent"]) == (4, 1), said


@pytest.mark.timeout(300)
def test_a_wait_for_the_device_under_the_preloaded_library(tmp_path: Path) -> None:
    """A rank that has not begun the op: the driver call in which it waits is the reason."""
    result = tmp_path / "device.json"
    done = subprocess.run(
        [sys.executable, str(CAMPAIGN), "--ranks", "2", "--only", "^H59 sync 2 r1$", "--preload",
         "--verbose", "--json", str(result)], capture_output=True, text=True,
    )  # fmt: skip
    said = done.stdout[-8000:] + done.stderr[-2000:]
    assert done.returncode == 0, said
    assert json.loads(result.read_text())["metrics"]["exact"]["value"] == 1, said
    unwrapped = " ".join(done.stdout.split())
    assert "waits for its device in cu" in unwrapped and "the newest of" in unwrapped, said
