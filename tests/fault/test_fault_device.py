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
CASES = r"^(H50 (kernel|ddp|pipe|inner) 3 r1|H52 event 3 r2|H59 sync 3 r1|H51 .*|N12 .*)$"


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
    assert written["cases"]["run"] == 8, said
    assert (metrics["exact"], metrics["silent"]) == (6, 2), said
