"""The hang campaign's short form: who is named when a job hangs, and that nobody is when it only looks like that."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

# Not those that depend on how loaded the machine is (jitter, stragglers, waits in new places):
# docs/hang.md has what they come to.
pytestmark = pytest.mark.exact
ROWS = r"^(H0|H1|H2[0-24]|H3|H4|N0|N1[03457]|N2[0-2])"

CAMPAIGN = Path(__file__).resolve().parent / "hang_campaign.py"


@pytest.mark.timeout(900)
def test_hang_campaign(tmp_path: Path) -> None:
    result = tmp_path / "hang.json"
    done = subprocess.run(
        [sys.executable, str(CAMPAIGN), "--quick", "--only", ROWS, "--jobs", "3", "--json", str(result)],
        capture_output=True,
        text=True,
    )
    said = done.stdout[-8000:] + done.stderr[-2000:]
    assert done.returncode == 0, said
    metrics = {name: metric["value"] for name, metric in json.loads(result.read_text())["metrics"].items()}
    assert metrics["wrong_single"] == 0 and metrics["false_verdicts"] == 0, said
    assert metrics["hang_cases"] >= 40 and metrics["healthy_cases"] >= 15
    assert metrics["right"] >= 0.95, said
