"""What is not restorable is reported once on the terminal, in full by `reft doctor`, and again at
the resume."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.resume import runs
from tests.support.launchers import Forkrun

SCRIPT = """# ranks: 2; kills: 5 5 5
import csv, json, queue, subprocess, sys
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("reft")
torch.manual_seed(1)
model = DDP(torch.nn.Linear(2, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
rows = csv.reader(str(i) for i in range(99))
waiting = queue.Queue()
for step in range(8):
    if step == 3:
        waiting.put(step)
    loss = model(torch.full((1, 2), float(next(rows)[0]))).sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    dist.barrier()
    if step == 5 and dist.get_rank() == 0:
        doctor = [sys.executable, "-m", "reft._cli.main", "doctor", "--json"]
        print("doctor " + json.dumps(json.loads(subprocess.run(doctor, capture_output=True).stdout)), flush=True)
    dist.barrier()
    waiting.empty()
dist.destroy_process_group()
"""


@pytest.fixture
def forkrun() -> Iterator[Forkrun]:
    launcher = Forkrun()
    yield launcher
    launcher.close()


@pytest.mark.timeout(200)
def test_what_does_not_come_back_is_told_everywhere(forkrun: Forkrun, tmp_path: Path) -> None:
    path = tmp_path / "reads_rows.py"
    path.write_text(SCRIPT)
    script = runs.Script(path, 2, (5, 5, 5))
    run = runs.run(forkrun, dataclasses.replace(script), max_restarts=1, REFT_FAULT="1:7:capture:kill")
    assert run.code == 0, run.said
    lines = run.said.splitlines()
    first = [line for line in lines if line.startswith("reft: not restorable: ")]
    assert first == ["reft: not restorable: <module>:rows (_csv.reader): iterator of unknown kind"], run.said
    later = [line for line in lines if "not restorable from step" in line]
    assert (
        len(later) == 1
        and "not restorable from step 4 on: <module>:waiting (queue.Queue): the items of a queue" in later[0]
    ), run.said
    told = [json.loads(line.removeprefix("doctor ")) for line in lines if line.startswith("doctor ")]
    assert told, run.said
    notes = [finding["text"] for finding in told[0]["findings"] if "not restorable" in finding["text"]]
    assert len(notes) == 2 and all(
        note.startswith("ranks 0, 1: not restorable: <module>:") for note in notes
    ), notes
    assert re.search(r"resumed at step [56]: state and place in the loop except 2 values", run.said), run.said
    assert any(
        line.startswith("reft: not restored: <module>:rows (_csv.reader)") and "1 more" in line for line in lines
    ), run.said
