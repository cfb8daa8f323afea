"""What a rank says of its end: fields of exceptions, the hooks, torchrun's error file."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from reft import _C
from reft._link import agent_protocol, last_words
from tests.fakes.native import FakeAgentClient


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeAgentClient]:
    monkeypatch.setattr(_C, "install_fault_words", lambda client: None)
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    before = sys.excepthook, threading.excepthook
    yield FakeAgentClient("", "{}", 0)
    assert (sys.excepthook, threading.excepthook) == before


def raised(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as caught:
        return caught


def said(client: FakeAgentClient) -> list[dict[str, Any]]:
    assert all(kind == agent_protocol.LAST_WORDS for kind, _ in client.sent)
    return [json.loads(payload) for _, payload in client.sent]


def test_the_newest_frame_comes_first() -> None:
    error = raised(KeyError("tokens"))
    fields = last_words.describe(error, error.__traceback__)
    assert fields["type"] == "KeyError" and fields["message"] == "'tokens'"
    assert fields["frames"][0]["function"] == "raised" and fields["at_ns"] > 0


def test_causes_and_numbers_of_errors() -> None:
    try:
        try:
            raise OSError(28, "No space left on device")
        except OSError as full:
            raise RuntimeError("cannot save") from full
    except RuntimeError as error:
        fields = last_words.describe(error, error.__traceback__)
    assert fields["errno"] == 28 and fields["causes"] == ["OSError: [Errno 28] No space left on device"]


def test_a_cause_that_leads_back_ends() -> None:
    error, other = raised(ValueError("a")), raised(ValueError("b"))
    error.__context__, other.__context__ = other, error
    assert len(last_words.describe(error, None)["causes"]) <= 4


def test_an_exception_that_cannot_be_written() -> None:
    class Unspeakable(Exception):
        def __str__(self) -> str:
            raise ValueError

    assert last_words.describe(raised(Unspeakable()), None)["message"] == ""


def test_an_exception_of_a_data_worker_has_its_frames_first() -> None:
    text = """Caught ValueError in DataLoader worker process 3.
Original Traceback (most recent call last):
  File "/x/site-packages/torch/utils/data/_utils/worker.py", line 349, in _worker_loop
    data = fetcher.fetch(index)
  File "/home/u/data.py", line 41, in __getitem__
    raise ValueError("bad")
ValueError: bad
"""
    fields = last_words.describe(raised(ValueError(text)), None)
    assert fields["frames"][0] == {"file": "/home/u/data.py", "line": 41, "function": "__getitem__"}
    assert fields["thread"] == "DataLoader worker process 3" and fields["message"] == "bad"


def test_the_hook_says_it_once_and_calls_the_one_before(
    client: FakeAgentClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[BaseException] = []
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, tb: seen.append(error))
    words = last_words.LastWords(client)  # type: ignore[arg-type]
    error = raised(ValueError("bad"))
    sys.excepthook(ValueError, error, error.__traceback__)
    monkeypatch.setattr(sys, "last_value", error, raising=False)
    words.leave(at_exit=True)
    assert seen == [error] and [one["kind"] for one in said(client)] == ["exception"]
    monkeypatch.undo()


def test_a_hook_that_came_later_does_not_hide_the_exception(
    client: FakeAgentClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = last_words.LastWords(client)  # type: ignore[arg-type]
    before = words._before
    sys.excepthook = lambda *_: None
    error = raised(ValueError("bad"))
    monkeypatch.setattr(sys, "last_value", error, raising=False)
    words.leave(at_exit=True)
    assert [one["message"] for one in said(client)] == ["bad"]
    assert sys.excepthook is not before  # the later one stays
    sys.excepthook = before


def test_an_exception_of_a_thread(client: FakeAgentClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading, "excepthook", lambda args: None)
    words = last_words.LastWords(client)  # type: ignore[arg-type]
    thread = threading.Thread(target=lambda: 1 // 0, name="feeder")
    thread.start()
    thread.join()
    words.leave(at_exit=False)
    (one,) = said(client)
    assert one["kind"] == "thread" and one["thread"] == "thread feeder" and one["type"] == "ZeroDivisionError"
    monkeypatch.undo()


def test_torchruns_error_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

    path = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    monkeypatch.setattr(last_words.time, "time", lambda: 100.5)
    last_words.write_error_file(raised(ValueError("bad")))
    failure = ProcessFailure(local_rank=0, pid=1, exitcode=1, error_file=str(path))
    assert failure.timestamp == 100
    assert "in raised" in failure.message["extraInfo"]["py_callstack"]  # type: ignore[index]
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_that_is_there_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "error.json"
    path.write_text("{}")
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    last_words.write_error_file(raised(ValueError("bad")))
    assert path.read_text() == "{}"


@pytest.mark.parametrize(
    "error", [SystemExit(3), KeyboardInterrupt(), RuntimeError("Connection closed by peer")]
)
def test_ends_that_are_no_failure_of_the_rank_write_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    last_words.write_error_file(raised(error))
    assert not list(tmp_path.iterdir())
