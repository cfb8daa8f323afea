"""A rank that stands in its data set never came to `init_process_group`, where the others waited in
silence until the timeout of the process group."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support import ranks
from tests.support.launchers import free_port

# As under torchrun, a process that is no rank has the store: the one that calls itself rank 3.
SCRIPT = """
import os, sys, time
import torch.distributed as dist

rank = int(os.environ["RANK"])


def load():
    if rank == int(sys.argv[1]):
        while sys.argv[2] == "busy":
            pass
        time.sleep(600)


store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=rank == 3, wait_for_workers=False)
if rank == 3:
    time.sleep(600)
load()
dist.init_process_group("reft", store=store, rank=rank, world_size=3)
"""


@pytest.mark.timeout(180)
@pytest.mark.parametrize(("missing", "does"), [(1, "sleep"), (0, "busy")])
def test_its_line_is_said_by_those_that_wait(missing: int, does: str, tmp_path: Path) -> None:
    script = tmp_path / "job.py"
    script.write_text(SCRIPT)
    launch = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "3"}
    with ranks.bench(REFT_HANG_SUSPECT_SEC="2") as bench:
        log = bench.folder / "log"
        bench.env["TORCHELASTIC_USE_AGENT_STORE"] = "True"
        with log.open("wb") as sink:
            started = [
                subprocess.Popen(
                    ["sh", "-c", f"exec {sys.executable} {script} {missing} {does} 2>&1"],
                    env={**bench.env, **launch, "RANK": str(rank)},
                    cwd=bench.folder,
                    stdout=sink,
                    start_new_session=True,
                )
                for rank in (3, 0, 1, 2)
            ]
        try:
            verb = "is at work" if does == "busy" else "stands"
            place = "job.py:1[01] load" if does == "busy" else "job.py:12 load"
            line = (
                rf"^reft: warning: slow: rank {missing} has not reached init_process_group: its"
                rf" process {verb} at {place} \(pid {started[1 + missing].pid}\); the others have"
                r" waited for \d+ s$"
            )
            deadline = time.monotonic() + 90
            while not (said := re.findall(line, log.read_text(), re.MULTILINE)):
                assert time.monotonic() < deadline, log.read_text()
                time.sleep(0.05)
            assert len(said) == 1
        finally:
            for process in started:
                os.killpg(process.pid, signal.SIGKILL)
                process.communicate()
