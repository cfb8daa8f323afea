"""How tests share two processes (`pytest -n 2 --dist loadgroup`): whole jobs, some of which are
watched for how long things take, one after the other in one of them; beside them the other files,
each in one piece for what its tests share."""

from __future__ import annotations

import pytest

_WHOLE_JOBS = ("tests/fault/", "tests/integration/")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Names the group of each test."""
    for item in items:
        file = item.nodeid.partition("::")[0]
        item.add_marker(pytest.mark.xdist_group("jobs" if file.startswith(_WHOLE_JOBS) else file))
