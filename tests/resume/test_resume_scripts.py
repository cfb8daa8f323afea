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

SCRIPTS = runs.scripts()
# Started by the real torchrun too, not only by the fork server that stands for it.
UNDER_TORCHRUN = ["module_level_for", "trainer_class"]

_references: dict[str, runs.Run] = {}


@pytest.fixture(scope="module")
def forkrun() -> Iterator[Forkrun]:
    launcher = Forkrun()
    yield launcher
    launcher.close()


def reference(launcher: Any, script: runs.Script) -> runs.Run:
    """The undisturbed run, made once."""
    if script.name not in _references:
        done = runs.run(launcher, script, REFT_DISABLE="1")
        assert done.code == 0, done.said
        for rank in range(script.ranks):
            lines = runs.of_rank(done.said.splitlines(), rank)
            assert len(lines) >= 8 and len(set(lines)) == len(lines), "lines that are alike show nothing"
            assert lines[-1].startswith(f"r{rank} final "), lines[-1]
        _references[script.name] = done
    return _references[script.name]


def check(launcher: Any, expected: runs.Run, script: runs.Script, which: int) -> None:
    kill = script.kills[which]
    fault = f"{which % script.ranks}:{kill}:{runs.POINTS[which]}:kill"
    killed = runs.run(launcher, script, REFT_FAULT=fault)
    assert killed.code == 0, killed.said
    assert f"fault point {runs.POINTS[which]} of step {kill}: kill" in killed.said, killed.said
    wrong = runs.compare(expected, killed, script.ranks, kill)
    assert not wrong, "\n".join([script.name, fault, *wrong, "", killed.said[-8000:]])


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
    check(forkrun, reference(forkrun, script), script, which)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", UNDER_TORCHRUN)
def test_under_torchrun(forkrun: Forkrun, name: str) -> None:
    script = next(script for script in SCRIPTS if script.name == name)
    check(Torchrun(), reference(forkrun, script), script, 1)
