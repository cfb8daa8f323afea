"""Unchanged scripts of many styles, killed at a step and compared bit for bit with an undisturbed run."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "fault")]

import runs  # noqa: E402
from launchers import Forkrun, Torchrun  # noqa: E402

SCRIPTS = runs.scripts("scripts")
# Started by the real torchrun too, not only by the fork server that stands for it.
UNDER_TORCHRUN = ["module_level_for", "trainer_class"]

_references: dict[str, runs.Run] = {}


@pytest.fixture(scope="module")
def forkrun() -> Iterator[Forkrun]:
    launcher = Forkrun()
    yield launcher
    launcher.close()


def cases() -> list[Any]:
    """Each script with each kill; one kill of each is not slow: not always the same one."""
    found = []
    for number, script in enumerate(SCRIPTS):
        for which in range(len(script.kills)):
            marks = [] if which == (number + 1) % len(script.kills) else [pytest.mark.slow]
            found.append(pytest.param(script, which, id=f"{script.name}-{script.kills[which]}", marks=marks))
    return found


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("script", "which"), cases())
def test_continues(forkrun: Forkrun, script: runs.Script, which: int) -> None:
    wrong = runs.check(forkrun, script, which, _references)
    assert not wrong, wrong


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", UNDER_TORCHRUN)
def test_under_torchrun(name: str) -> None:
    script = next(script for script in SCRIPTS if script.name == name)
    wrong = runs.check(Torchrun(), script, 1, _references)
    assert not wrong, wrong
