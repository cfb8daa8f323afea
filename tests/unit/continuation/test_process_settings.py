"""Settings of the process and the garbage collector, without a program around them."""

from __future__ import annotations

import gc
import os
import sys
from pathlib import Path

import pytest

from reft._continuation import collector
from reft._continuation.settings import Settings


def test_another_rank_keeps_its_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    problems = Settings().restore({"working directory": "/"}, foreign=True)
    assert [where for where, _, _ in problems] == ["working directory"]
    assert os.getcwd() == str(tmp_path)


def test_one_that_cannot_be_set_leaves_the_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir("/")
    limit = sys.getrecursionlimit()
    problems = Settings().restore({"recursion limit": -1, "working directory": str(tmp_path)})
    assert [where for where, _, _ in problems] == ["recursion limit"]
    assert (os.getcwd(), sys.getrecursionlimit()) == (str(tmp_path), limit)


def test_a_child_that_is_forked_within_a_capture_collects() -> None:
    assert gc.isenabled()
    with collector.off:
        assert not gc.isenabled()
        child = os.fork()
        if child == 0:
            os._exit(0 if gc.isenabled() else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert gc.isenabled()
    gc.disable()
    try:
        with collector.off:
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
