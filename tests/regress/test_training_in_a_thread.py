"""Training runs in a thread, as under Ray, and stops there: the main thread, which waits for a
queue all the time, was named, at its own line, as certain."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support import ranks
from tests.support.launchers import free_port

SCRIPT = """
import queue, threading, time
import torch, torch.distributed as dist


def fetch_features(step):
    if dist.get_rank() == 1 and step == 10:
        time.sleep(600)


def train():
    for step in range(20):
        fetch_features(step)
        dist.all_reduce(torch.ones(4))


dist.init_process_group("reft")
thread = threading.Thread(target=train, daemon=True)
thread.start()
while thread.is_alive():
    try:
        queue.Queue().get(timeout=0.5)
    except queue.Empty:
        pass
"""


def _first_verdict(folder: Path) -> dict[str, Any]:
    deadline = time.monotonic() + 90
    while not (texts := sorted(folder.glob("run/*/node-*/verdicts/*.txt"))):  # written last
        assert time.monotonic() < deadline, "no verdict"
        time.sleep(0.05)
    verdict: dict[str, Any] = json.loads(texts[0].with_suffix(".json").read_bytes())
    return verdict


@pytest.mark.timeout(180)
def test_the_line_of_the_training_thread_is_named(tmp_path: Path) -> None:
    script = tmp_path / "job.py"
    script.write_text(SCRIPT)
    with ranks.bench(REFT_HANG_SUSPECT_SEC="1.5") as bench:
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
        started = [bench.start(script, **address, RANK=str(rank)) for rank in range(2)]
        try:
            verdict = _first_verdict(bench.folder)
        finally:
            for process in started:
                os.killpg(process.pid, signal.SIGKILL)
                process.communicate()
    (culprit,) = verdict["culprits"]
    assert (verdict["state"], verdict["confidence"], culprit["rank"]) == ("hang", "certain", 1)
    assert (culprit["frame"]["line"], culprit["frame"]["function"]) == (8, "fetch_features")
    assert culprit["reason"] == "user_code"
    assert "not in its main thread" in culprit["text"]
    assert any("job.py:8 fetch_features" in line for line in verdict["screen"].splitlines())
