"""Optimizer state that a second rank computes: equal bit for bit, and enough to lose a node."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.test_several_nodes import Job, OwnStateJob

pytestmark = pytest.mark.exact
HERE = Path(__file__).resolve().parent


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "steps"), [(2, 100), (3, 50)])
def test_state_computed_a_second_time_is_equal(tmp_path: Path, ranks: int, steps: int) -> None:
    found = tmp_path / "found.json"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}",
               str(HERE / "recomputed_worker.py"), "--steps", str(steps), "--out", str(found)]  # fmt: skip
    done = subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True,
                          timeout=600, check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr
    results = json.loads(found.read_text())
    assert results.pop("spoiled").startswith("step 99: ['"), results
    assert len(results) > 20
    assert {name: text for name, text in results.items() if text not in ("equal", "none")} == {}


class ShardedJob(OwnStateJob):
    """Each rank keeps a part of the optimizer's state."""

    def arguments(self, steps: int) -> list[str]:
        return ["--state", "sharded", "--steps", str(steps), "--delay", "0.05", "--out", str(self.folder)]


@pytest.mark.slow
def test_lost_node_comes_back_with_aor(tmp_path: Path) -> None:
    """What of an optimizer was kept there alone, too. With arc, training starts from its beginning."""
    for name in ("reference", "arc", "aor", "auto"):
        (tmp_path / name).mkdir()
    undisturbed = ShardedJob(tmp_path / "reference")
    undisturbed.finish()
    with_arc = ShardedJob(tmp_path / "arc", REFT_SNAPSHOT_PROTECTION="arc")
    with_arc.lose_node("1")
    text = with_arc.finish()
    assert "training starts from its beginning" in text, text
    assert "a lost node is NOT survived (REFT_SNAPSHOT_PROTECTION=arc): no other rank has" in text, text

    for protection in ("aor", "auto"):
        job = ShardedJob(tmp_path / protection, REFT_SNAPSHOT_PROTECTION=protection)
        job.lose_node("1")
        text = job.finish()
        assert "each shard of rank 0's state survives the loss of any node" in text, text
        assert re.search(r"resumed at step \d+", text), text
        assert "NOT survived" not in text, text
        assert job.finals() == undisturbed.finals()
    chosen = "REFT_SNAPSHOT_PROTECTION=auto: aor; not aec, arc: a ZeroRedundancyOptimizer keeps each"
    assert chosen in text, text


@pytest.mark.slow
def test_aor_without_a_sharded_optimizer_says_that_it_is_arc(tmp_path: Path) -> None:
    text = Job(tmp_path, steps=3, REFT_SNAPSHOT_PROTECTION="aor").finish()
    assert text.count("no ZeroRedundancyOptimizer was found, so REFT_SNAPSHOT_PROTECTION=aor does what arc") == 1, text
    assert "each shard of rank 0's state survives the loss of any node" in text, text
