"""What a rank writes to the terminal, and how figures are written."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from reft import _C, _voice

TABLE = Path(__file__).resolve().parent.parent / "words.inc"


def rows(kind: str) -> list[tuple[str, list[int]]]:
    """Rows of the table that the C++ tests read too."""
    found = re.findall(rf'^{kind}\("([^"]+)"(.*)\)$', TABLE.read_text(), re.MULTILINE)
    return [(text, [int(n) for n in re.findall(r"\d+", numbers)]) for text, numbers in found]


def test_ranks_are_written_as_in_hang_reports() -> None:
    table = rows("RANKS")
    assert len(table) > 4
    for text, numbers in table:
        assert _voice.ranks(numbers) == _voice.ranks(reversed(numbers)) == text


def test_sizes_are_written_as_in_hang_reports() -> None:
    table = rows("SIZE")
    assert len(table) > 4
    for text, (count,) in table:
        assert _voice.size(count) == text
    assert _voice.size(-2048) == "-2.0 KiB"


def test_the_sentence_about_the_overhead() -> None:
    assert _voice.overhead(1, 12_345, 3_000) == (
        "a snapshot every step costs 1.2 % ± 0.30 % of the mean step (measured)"
    )
    assert _voice.overhead(8, 500, 900).endswith(
        "costs at most 0.14 % of the mean step (within noise)"
    )
    assert "at most 10.0 % of" in _voice.overhead(1, -300_000, 100_000)
    assert _voice.overhead(8, 500, -1) == "a snapshot every 8 steps; overhead not measured yet"


@pytest.mark.parametrize(("count", "text"), [(0, "0 ranks"), (1, "1 rank"), (2, "2 ranks")])
def test_plurals(count: int, text: str) -> None:
    assert _voice.plural(count, "rank") == text


def test_each_kind_of_warning_is_written_once(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    logged: list[str] = []
    monkeypatch.setattr(_C, "log_debug", logged.append)
    for text in ("first", "second"):
        _voice.warn_once("kind", text)
    _voice.warn_once("other kind", "third")
    assert capsys.readouterr().err == "reft: warning: first\nreft: warning: third\n"
    assert logged == ["second"]


@pytest.mark.parametrize("closed", [True, False])
def test_a_terminal_that_is_gone_is_no_error(monkeypatch: pytest.MonkeyPatch, closed: bool) -> None:
    stream = io.StringIO()
    stream.close()
    monkeypatch.setattr(sys, "stderr", stream if closed else None)
    _voice.say("text")


def test_details_go_to_the_log_that_its_setting_shows() -> None:
    script = "import torch; from reft import _voice; _voice.debug('planned')"
    for spec, shown in (("reft.python=debug", True), ("warn", False)):
        done = subprocess.run(
            [sys.executable, "-c", script],
            env=os.environ | {"REFT_LOG": spec},
            capture_output=True,
            text=True,
            check=True,
        )
        assert ("planned" in done.stderr) == shown, done.stderr
