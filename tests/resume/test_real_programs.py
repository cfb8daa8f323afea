"""Programs as people write them with the usual packages, unchanged but for the backend's name, under torchrun."""

from __future__ import annotations

import pytest

from tests.resume import runs
from tests.support.launchers import Torchrun

PROGRAMS = {program.name: program for program in runs.scripts("programs")}
pytestmark = [pytest.mark.slow, pytest.mark.exact]
_references: dict[str, runs.Run] = {}


@pytest.mark.timeout(900)
@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.parametrize("name", sorted(PROGRAMS))
def test_continues(name: str, which: int) -> None:
    if absent := runs.missing(PROGRAMS[name]):
        pytest.skip(f"not installed: {', '.join(absent)}")
    wrong = runs.check(Torchrun(), PROGRAMS[name], which, _references)
    assert not wrong, wrong
