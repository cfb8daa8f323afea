"""What holds for all tests: the path of the programs that they start, and how several processes
share the tests.

`pytest -n 3` runs the whole jobs whose times some tests watch one after the other in one process.
The other files go to any process, each file in one piece for what its tests share.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tools.devtools.results import TOO_LATE

if TYPE_CHECKING:
    from xdist.scheduler import LoadScopeScheduling

# time.monotonic() after which no test begins: CI's machines differ in speed.
_LATEST_START = float(os.environ.get("TESTS_LATEST_START", "inf"))
_ROOT = Path(__file__).resolve().parent.parent
_WHOLE_JOBS = ("tests/fault/", "tests/integration/")
# Of these, the files whose tests look at results alone, so that they may run beside others.
_UNTIMED = {
    "tests/fault/test_fault_check.py",
    "tests/fault/test_fault_kill.py",
    "tests/fault/test_fault_scripts.py",
    *(
        f"tests/integration/test_{name}.py"
        for name in (
            "autoload", "backend_autoload", "backend_cases", "bad_input", "consistent_cut", "cuda",
            "drill", "never_wrong", "notes", "parallelism_matrix", "resume", "unprotected",
            "verified_resume",
        )
    ),
}  # fmt: skip

# Workers that a test starts, under torchrun too, find `tests.support` as pytest does.
os.environ["PYTHONPATH"] = os.pathsep.join(
    [str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
)


def pytest_runtest_setup() -> None:
    if time.monotonic() > _LATEST_START:
        pytest.skip(TOO_LATE)


def group_of(test: str) -> str:
    """The tests that one process runs one after the other."""
    file = test.partition("::")[0]
    alone = file.startswith(_WHOLE_JOBS) and file not in _UNTIMED
    return "jobs" if alone else file


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling:
    """Shares the tests by `group_of`. xdist's own `loadgroup` writes the groups behind the names of
    the tests, which pytest 9.2 no longer shows: each test went to either process."""
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return group_of(nodeid)

    return Scheduling(config, log)
