"""Training that nothing protects is told so: collectives progress and nothing is committed."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("reft._C")

from tests.support.launchers import kill_all, rank_pids, torchrun

# An update that no torch.optim optimizer makes, until somebody says that it is enough.
SCRIPT = """
import os, sys, torch, torch.distributed as dist

dist.init_process_group("reft")
weights = torch.zeros(4)
while True:
    gradient = torch.ones(4)
    dist.all_reduce(gradient)
    weights -= 0.1 * gradient
    enough = torch.tensor([float(os.path.exists(sys.argv[1]))])
    dist.all_reduce(enough)
    if enough.item() > 0:
        break
dist.destroy_process_group()
"""


@pytest.mark.timeout(240)
def test_a_loop_without_an_optimizer_is_said_to_be_unprotected(tmp_path: Path) -> None:
    script, enough, said = tmp_path / "train.py", tmp_path / "enough", tmp_path / "said"
    script.write_text(SCRIPT)
    run_dir = tempfile.mkdtemp(prefix="reft-" + "long-" * 25)  # longer than the address of a socket can be
    env = os.environ | {
        "REFT_RUN_DIR": run_dir, "REFT_JOB_ID": "unprotected", "REFT_SNAPSHOT_ALARM_SEC": "1", "REFT_AGENT_LINGER_SEC": "1",
        "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    with said.open("w") as out:
        job = subprocess.Popen(torchrun(script, str(enough), ranks=2), env=env, stdout=out, stderr=subprocess.STDOUT)
        try:
            end = time.monotonic() + 180
            while said.read_text().count("training is UNPROTECTED") < 2:
                assert job.poll() is None and time.monotonic() < end, said.read_text()
                time.sleep(0.05)
            enough.touch()
            assert job.wait(60) == 0, said.read_text()
        finally:
            job.kill()
            kill_all(rank_pids("unprotected"))  # they do not end with their launcher
            shutil.rmtree(run_dir, ignore_errors=True)
    assert "call reft.step() after each training step" in said.read_text()
