"""A rank that starts the others, as Lightning does: they have other parents, and were two jobs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import ranks
from tests.support.launchers import free_port

SCRIPT = """
import os, subprocess, sys
import short_training

if "LOCAL_RANK" not in os.environ:
    os.environ.update(NODE_RANK="0", LOCAL_RANK="0", WORLD_SIZE="2")
    child = subprocess.Popen([sys.executable, *sys.argv], env={**os.environ, "LOCAL_RANK": "1"})
os.environ["RANK"] = os.environ["LOCAL_RANK"]
short_training.train(int(os.environ["RANK"]), 2, short_training.arguments())
if os.environ["RANK"] == "0":
    child.wait()
"""


@pytest.mark.timeout(180)
def test_all_ranks_find_one_agent(tmp_path: Path) -> None:
    script = tmp_path / "launch.py"
    script.write_text(SCRIPT)
    with ranks.bench() as bench:
        said = bench.run(script, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
    assert ranks.committed(said) == [8, 8], said
    assert len(ranks.job_ids(said)) == 1
