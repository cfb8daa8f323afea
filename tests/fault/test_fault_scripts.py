"""The campaign of random scripts, in short: no resume of theirs is wrong without a word."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.script_case import assembly

pytestmark = pytest.mark.exact
CAMPAIGN = Path(__file__).resolve().parent / "scripts_campaign.py"


def campaign(result: Path, *arguments: str) -> dict[str, float]:
    """How many cases had each verdict."""
    command = [sys.executable, str(CAMPAIGN), *arguments, "--json", str(result)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    return {name: metric["value"] for name, metric in json.loads(result.read_text())["metrics"].items()}


@pytest.mark.timeout(300)
def test_no_resume_of_random_scripts_is_wrong_in_silence(tmp_path: Path) -> None:
    counts = campaign(tmp_path / "scripts.json", "--seed", "7", "--cases", "3")
    assert counts["exact"] + counts["unclaimed"] + counts["named"] >= 1
    assert counts["silent"] == counts["false"] == counts["crashed"] == 0


@pytest.mark.timeout(300)
def test_state_of_each_kind_comes_back_or_is_named(tmp_path: Path) -> None:
    counts = campaign(tmp_path / "places.json", "--places", "--seed", "7", "--cases", "40")
    assert counts["exact"] >= 25 and counts["unusable"] <= 4
    assert counts["silent"] == counts["crashed"] == 0


def test_a_case_follows_from_its_seed_and_number_alone() -> None:
    one, two = (assembly.text(assembly.draw(3, 5)) for _ in range(2))
    assert one == two != assembly.text(assembly.draw(3, 6))
    for number in range(40):
        compile(assembly.text(assembly.draw(1, number)), f"case {number}", "exec")
