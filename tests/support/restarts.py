"""Runs the text of a script as a job that is killed and started again.

The script may call `maybe_kill(step, rank=None)`, which ends the rank by SIGKILL in the first attempt
if the test wants it there, and `final(*tensors)`, which prints a hash for its rank.
"""

from __future__ import annotations

import re
import shutil
import tempfile
import time
from pathlib import Path

from tests.support.launchers import Forkrun, agent_pids, kill_all

_DEADLINE_SEC = 200
_HEAD = """
import contextlib, hashlib, os, signal, sys, time
import torch, torch.distributed as dist
torch.set_num_threads(1)
def maybe_kill(step, rank=None):
    here = rank is None or rank == dist.get_rank()
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and step == int(os.environ["KILL"]) and here:
        import reft
        reft.snapshot_now(20)  # what was taken has its outcome: the test knows which step comes back
        os.kill(os.getpid(), signal.SIGKILL)
def final(*tensors):
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.detach().contiguous().numpy().tobytes())
    print("FINAL", dist.get_rank(), digest.hexdigest()[:16], flush=True)
"""
_JOIN = 'dist.init_process_group("reft")\n'


def run(body: str, ranks: int, kill: int = 0, before: str = "", **env: str) -> str:
    """What all ranks printed, in all attempts.

    Args:
        kill: the step at which `maybe_kill` acts, 0 for none.
        before: what the script does before it makes the process group.

    Raises:
        AssertionError: the job failed or did not end.
    """
    folder = Path(tempfile.mkdtemp(prefix="reft-rg-"))
    launcher = Forkrun()
    try:
        script = folder / "train.py"
        script.write_text(_HEAD + before + _JOIN + body + "\ndist.destroy_process_group()\n")
        environment = {
            "REFT_JOB_ID": folder.name,
            "REFT_RUN_DIR": str(folder / "run"),
            "REFT_AGENT_LINGER_SEC": "60",
            "REFT_RESUME_VERIFY": "off",  # these tests count the steps of a resumed run
            "KILL": str(kill),
        } | env
        log = folder / "log"
        launcher.start([str(script)], environment, log, ranks, max_restarts=1)
        end = time.monotonic() + _DEADLINE_SEC
        while (code := launcher.poll()) is None and time.monotonic() < end:
            time.sleep(0.02)
        if code is None:
            launcher.kill()
        said = log.read_text(errors="replace")
        assert code == 0, said[-6000:]
        return said
    finally:
        launcher.close()
        kill_all(agent_pids(folder / "run"))
        shutil.rmtree(folder, ignore_errors=True)


def finals(said: str) -> dict[int, str]:
    """The hash that each rank printed last."""
    return {int(rank): digest for rank, digest in re.findall(r"^FINAL (\d+) (\w+)$", said, re.M)}


def resumed_step(said: str) -> int | None:
    """The step at which the job resumed, None if it did not."""
    found = re.search(r"reft: resumed at step (\d+)", said)
    return int(found[1]) if found else None
