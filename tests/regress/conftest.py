"""What regress tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.killed import Runner, runner


@pytest.fixture(scope="module")
def jobs() -> Iterator[Runner]:
    """Runs scripts undisturbed and killed."""
    with runner() as made:
        yield made
