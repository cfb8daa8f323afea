"""tests/conftest.py shares the tests between processes."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
FILES = ["tests/unit/python/test_sets.py", "tests/unit/tools/test_check_layers.py"]


def test_each_file_runs_in_one_process_and_the_files_in_two() -> None:
    words = [sys.executable, "-m", "pytest", "-n", "2", "-v", "-p", "no:cacheprovider", *FILES]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    ran = re.findall(r"\[(gw\d)\].* PASSED (\S+?)::", done.stdout)
    assert {file for _, file in ran} == set(FILES), done.stdout
    assert len(set(ran)) == 2, f"tests of a file ran in both processes: {sorted(set(ran))}"
    assert len({process for process, _ in ran}) == 2
