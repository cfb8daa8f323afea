"""The kill campaign's short form: promises "SIGKILL of any rank(s)", "agent killed", "agent and all its ranks"."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.exact
CAMPAIGN = Path(__file__).resolve().parent / "kill_campaign.py"
CASES = 18


@pytest.mark.timeout(900)
def test_kill_campaign(tmp_path: Path) -> None:
    result = tmp_path / "kill.json"
    done = subprocess.run(
        [sys.executable, str(CAMPAIGN), "--cases", str(CASES), "--seed", "7", "--json", str(result)],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    written = json.loads(result.read_text())
    assert written["cases"] == {"run": CASES, "failed": 0, "skipped": written["cases"]["skipped"]}
    assert written["cases"]["skipped"] <= 3, done.stdout
    assert written["metrics"]["wrong_bits"]["value"] == 0
    assert written["metrics"]["hangs"]["value"] == 0
