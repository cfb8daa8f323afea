"""What holds for all tests: the path of the programs that they start, and how two processes share
the tests.

`pytest -n 2 --dist loadgroup` runs whole jobs, whose times some tests watch, one after the other in
one process. The other files go to either process, each file in one piece for what its tests share.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

_ROOT = Path(__file__).resolve().parent.parent
_WHOLE_JOBS = ("tests/fault/", "tests/integration/")
# Of these, the files whose tests look at results alone, so that they may run beside others.
_UNTIMED = {
    f"tests/integration/test_{name}.py"
    for name in ("drill", "parallelism_matrix", "never_wrong", "verified_resume")
}

# Workers that a test starts, under torchrun too, find `tests.support` as pytest does.
os.environ["PYTHONPATH"] = os.pathsep.join(
    [str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Names the group of each test."""
    for item in items:
        file = item.nodeid.partition("::")[0]
        alone = file.startswith(_WHOLE_JOBS) and file not in _UNTIMED
        group = "jobs" if alone else file
        item.add_marker(pytest.mark.xdist_group(group))
