"""Each gap of docs/resume.md that an unverified resume does not report, as a script that shows it.

A test fails if its gap is gone: then delete the script, run tools/gen_gap_docs, and move the row to
what comes back. It also fails if the gap is reported otherwise than the script's header says.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.resume import runs
from tests.support.launchers import Forkrun

pytestmark = [pytest.mark.exact, pytest.mark.one_python]

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).with_name("gaps")
KILL = 7
_references: dict[str, runs.Run] = {}


@pytest.fixture(scope="module")
def forkrun() -> Iterator[Forkrun]:
    launcher = Forkrun()
    yield launcher
    launcher.close()


def gaps() -> list[Path]:
    return sorted(path for path in HERE.glob("*.py") if path.read_text().startswith("# state: "))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("path", [pytest.param(path, id=path.stem) for path in gaps()])
def test_the_gap_is_there_and_reported_as_the_page_says(forkrun: Forkrun, path: Path) -> None:
    script = runs.Script(path, 2, (KILL,))
    expected = runs.reference(forkrun, script, _references)
    killed = runs.run(forkrun, script, REFT_FAULT=f"*:{KILL}:capture:kill")
    assert f"fault point capture of step {KILL}: kill" in killed.said, killed.said
    assert killed.code == 0 and len(killed.attempts()) == 2, killed.said
    wrong = runs.compare(expected, killed, 2, KILL, named=True)
    warned = [line for line in wrong if "the resume is not exact" in line]
    (resumed,) = re.findall(r"reft: (resumed at step .*)", killed.said)
    assert len(wrong) > len(warned), f"the gap is gone: {resumed}"
    assert "state and place in the loop, " in resumed, f"the gap is reported: {resumed}"
    (stated,) = re.findall(r"^# reported: (.*)$", path.read_text(), re.MULTILINE)
    ways = ["after the first snapshot"] if "reft: taken for unchanged: " in killed.said else []
    ways += ["by a verified resume"] if warned else []
    assert ("; ".join(ways) or "no") == stated, "\n".join([resumed, *wrong])


def test_the_page_lists_these_gaps_and_no_others() -> None:
    command = [sys.executable, str(ROOT / "tools" / "gen_gap_docs"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
