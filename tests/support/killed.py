"""Runs a script undisturbed and killed, for regress tests: both must end with the same lines."""

from __future__ import annotations

import contextlib
import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from tests.support.launchers import Forkrun, agent_pids, kill_all

_DEADLINE_SEC = 90
_HEAD = """
import hashlib, os
import torch, torch.distributed as dist
torch.set_num_threads(1)
BEFORE
dist.init_process_group("reft")
torch.manual_seed(0)
attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))

def final(*tensors, **more):
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.detach().contiguous().numpy().tobytes())
    print("FINAL", dist.get_rank(), digest.hexdigest()[:16], more, flush=True)
    dist.destroy_process_group()
"""


class Runner:
    """Runs scripts whose text follows `_HEAD`; they end with `final(…)`."""

    def __init__(self, launcher: Forkrun) -> None:
        self._launcher = launcher

    def run(
        self, script: str, ranks: int = 1, kill: str = "", before: str = "", **env: str
    ) -> str:
        """What all ranks said.

        Args:
            before: what comes before the process group.
            kill: "RANK:STEP:POINT" of the only fault, as in REFT_FAULT; "" for none.
        """
        folder = Path(tempfile.mkdtemp(prefix="reft-killed-"))
        log = folder / "log"
        (folder / "script.py").write_text(_HEAD.replace("BEFORE", before) + script)
        settings = {
            "REFT_JOB_ID": folder.name,
            "REFT_RUN_DIR": str(folder / "run"),
            "REFT_AGENT_LINGER_SEC": "30",
            "REFT_RESUME_VERIFY": "off",  # these tests count the lines of a resumed run
            **env,
        }
        if kill:
            settings["REFT_FAULT"] = f"{kill}:kill"
        try:
            self._launcher.start([str(folder / "script.py")], settings, log, ranks, 2)
            deadline = time.monotonic() + _DEADLINE_SEC
            while (code := self._launcher.poll()) is None:
                if time.monotonic() > deadline:
                    self._launcher.kill()
                    raise TimeoutError(log.read_text(errors="replace")[-4000:])
                time.sleep(0.01)
            said = log.read_text(errors="replace")
            assert code == 0, said[-4000:]
            if kill:
                assert ": kill" in said, f"was not killed: {said[-4000:]}"
            return said
        finally:
            kill_all(agent_pids(folder / "run"))
            shutil.rmtree(folder, ignore_errors=True)

    def same(
        self,
        script: str,
        ranks: int = 1,
        kill: str = "0:6:before_seal",
        before: str = "",
        **env: str,
    ) -> str:
        """Checks that a killed run resumes, place in the loop included, and ends as an undisturbed
        one. Returns what the killed one said."""
        undisturbed = self.run(script, ranks, before=before, **env)
        killed = self.run(script, ranks, kill, before, **env)
        assert re.search(r"resumed at step \d+: state and place in the loop", killed), killed[
            -4000:
        ]
        assert finals(killed) == finals(undisturbed) and len(finals(killed)) == ranks, killed[
            -4000:
        ]
        return killed


def finals(said: str) -> list[str]:
    """The lines of `final`, by rank."""
    return sorted(line for line in said.splitlines() if line.startswith("FINAL "))


@contextlib.contextmanager
def runner() -> Iterator[Runner]:
    """A runner whose server ends with it."""
    launcher = Forkrun()
    try:
        yield Runner(launcher)
    finally:
        launcher.close()
