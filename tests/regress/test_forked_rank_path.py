"""A forked rank (a notebook's launcher) took the launcher's frames for its own: the place in the loop was refused."""

from __future__ import annotations

import multiprocessing
import sys
from typing import Any

from reft._continuation.frames import frames_from


def train(answers: Any) -> None:
    answers.put([frame.f_code.co_name for frame, _, _ in frames_from(sys._getframe())])


def launch() -> list[str]:
    context: Any = multiprocessing.get_context("fork")
    answers = context.SimpleQueue()
    rank = context.Process(target=train, args=(answers,))
    rank.start()
    names: list[str] = answers.get()
    rank.join(30)
    return names


def test_path_of_a_forked_process_begins_at_its_fork() -> None:
    names = launch()
    assert names[-1] == "train"
    assert "launch" not in names and "start" not in names
