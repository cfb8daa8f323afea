"""tests/conftest.py shares the tests between processes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

from tools.devtools.results import TOO_LATE

ROOT = Path(__file__).resolve().parents[3]
FILES = ["tests/unit/python/test_sets.py", "tests/unit/tools/test_check_layers.py"]


def test_each_file_runs_in_one_process_and_the_files_in_two() -> None:
    words = [sys.executable, "-m", "pytest", "-n", "2", "-v", "-p", "no:cacheprovider", *FILES]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    ran = re.findall(r"\[(gw\d)\].* PASSED (\S+?)::", done.stdout)
    assert {file for _, file in ran} == set(FILES), done.stdout
    assert len(set(ran)) == 2, f"tests of a file ran in both processes: {sorted(set(ran))}"
    assert len({process for process, _ in ran}) == 2


def test_no_test_begins_after_the_time_that_the_environment_gives() -> None:
    words = [sys.executable, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", FILES[0]]
    for latest, outcome in ((0.0, "skipped"), (time.monotonic() + 600, "passed")):
        environment = os.environ | {"TESTS_LATEST_START": str(latest)}
        done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        counts = re.findall(r"\d+ (passed|failed|skipped|error)", done.stdout)
        assert counts == [outcome], done.stdout
        assert (TOO_LATE in done.stdout) == (outcome == "skipped"), done.stdout
