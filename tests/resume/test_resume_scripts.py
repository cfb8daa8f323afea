"""Unchanged scripts of many styles, killed at a step and compared bit for bit with an undisturbed run."""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.resume import runs
from tests.support.launchers import Forkrun, Torchrun

pytestmark = pytest.mark.exact


SCRIPTS = runs.scripts("scripts")
# Started by the real torchrun too, not only by the fork server that stands for it.
UNDER_TORCHRUN = ["module_level_for", "trainer_class"]
# Run under every supported version of Python, the others under one: between them they meet all that
# is read from its frames.
EVERY_PYTHON = [
    "callbacks_registry", "function_while", "gan", "generator_source", "list_data_sorted", "module_level_for", "shuffle_workers",
    "switched_functions", "tallies", "tqdm_progress", "trainer_class", "try_except", "two_modules",
]  # fmt: skip

_references: dict[str, runs.Run] = {}


@pytest.fixture(scope="module")
def forkrun() -> Iterator[Forkrun]:
    launcher = Forkrun()
    yield launcher
    launcher.close()


def cases() -> list[Any]:
    """Each script with each kill; one kill of each is not slow, not always the same one. CI takes
    this one alone but for the scripts that every Python runs."""
    found = []
    for number, script in enumerate(SCRIPTS):
        for which in range(len(script.kills)):
            marks = [] if which == (number + 1) % len(script.kills) else [pytest.mark.slow]
            if script.name not in EVERY_PYTHON:
                marks += [pytest.mark.one_python, *([pytest.mark.more] if marks else [])]
            found.append(pytest.param(script, which, id=f"{script.name}-{script.kills[which]}", marks=marks))
    return found


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("script", "which"), cases())
def test_continues(forkrun: Forkrun, script: runs.Script, which: int) -> None:
    if absent := runs.missing(script):
        pytest.skip(f"not installed: {', '.join(absent)}")
    wrong = runs.check(forkrun, script, which, _references)
    assert not wrong, wrong


@pytest.mark.one_python
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", UNDER_TORCHRUN)
def test_under_torchrun(name: str) -> None:
    script = next(script for script in SCRIPTS if script.name == name)
    wrong = runs.check(Torchrun(), script, 1, _references)
    assert not wrong, wrong


@pytest.mark.timeout(300)
def test_edited_script_keeps_its_tensors(forkrun: Forkrun, tmp_path: Path) -> None:
    """Other code in a frame of the loop: the place is refused, with one line that says where, and tensors come back."""
    original = next(script for script in SCRIPTS if script.name == "function_while")
    shutil.copy(original.path.parent / "digest.py", tmp_path)
    script = dataclasses.replace(original, path=tmp_path / original.path.name)
    script.path.write_text(original.path.read_text())
    kept = {"REFT_JOB_ID": f"edited-{os.getpid()}", "REFT_VAULT_DIR": str(tmp_path)}
    killed = runs.run(forkrun, script, max_restarts=0, REFT_FAULT="0:6:after_vote:kill", **kept)
    assert killed.code != 0 and "fault point after_vote of step 6" in killed.said, killed.said
    edited = original.path.read_text().replace("        iteration += 1\n", "        iteration += 2\n")
    assert edited != original.path.read_text()
    script.path.write_text(edited)
    again = runs.run(forkrun, script, max_restarts=0, **kept)
    assert again.code == 0, again.said
    refused = [line for line in again.said.splitlines() if "place in the loop not restored" in line]
    assert len(refused) == 1 and "reft: ranks 0 1: place" in refused[0], again.said
    assert re.search(r"function_while\.py:\d+ main: the code has changed", refused[0]), again.said
    assert "resumed at step 6: state," in again.said or "resumed at step 5: state," in again.said, again.said
    counted = [line.split()[2] for line in runs.of_rank(again.said.splitlines(), 0) if " it " in line]
    assert counted == ["2", "4", "6", "8", "10", "12"]
