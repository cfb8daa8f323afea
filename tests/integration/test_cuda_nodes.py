"""A lost node whose ranks had their state on CUDA devices, on stand-ins where there is no GPU."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.fakes.cuda import environment as cuda
from tests.integration.test_several_nodes import Job

pytestmark = pytest.mark.skipif(bool(cuda.missing()), reason=cuda.missing())
HERE = Path(__file__).resolve().parent
NODES = 3


class CudaJob(Job):
    script = HERE / "cuda_nodes_worker.py"

    def arguments(self, steps: int) -> list[str]:
        return ["--steps", str(steps), "--out", str(self.folder)]

    def newest_step(self) -> int:
        log = self.folder / "r0.log"
        lines = log.read_text().splitlines() if log.exists() else []
        return max((int(line.split()[0]) for line in lines), default=0)

    def finals(self) -> list[str]:
        return [(self.folder / f"r{rank}.final").read_text() for rank in range(NODES)]


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_lost_node_comes_back_from_parities_that_devices_have_made(tmp_path: Path) -> None:
    (tmp_path / "reference").mkdir()
    environment = cuda.environment(1)
    reference = CudaJob(tmp_path / "reference", nodes=NODES, **environment)
    reference.finish()
    assert len(set(reference.finals())) == 1
    job = CudaJob(tmp_path, nodes=NODES, REFT_SNAPSHOT_PROTECTION="aec", **environment)
    job.lose_node("1")
    text = job.finish()
    assert "each shard of rank 0's state survives the loss of any node" in text, text
    assert "stores no parities" not in text and "NOT protected" not in text, text
    assert re.search(r"resumed at step \d+", text), text
    assert "without the vaults of rank 1, whose small state is that of replicas" in text, text
    assert job.finals() == reference.finals()
