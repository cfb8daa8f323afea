"""What only a real GPU shows: a killed rank resumes bit for bit where the device draws random
numbers, fuses attention, convolves, scales gradients, or replays graphs.

REFT_REQUIRE_CUDA=1 runs them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.launchers import Forkrun, TrainJob

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        os.environ.get("REFT_REQUIRE_CUDA") != "1", reason="needs a GPU (REFT_REQUIRE_CUDA=1)"
    ),
]


@pytest.fixture(scope="module")
def forkrun() -> Iterator[Forkrun]:
    launcher = Forkrun({"CUBLAS_WORKSPACE_CONFIG": ":4096:8"})
    yield launcher
    launcher.close()


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "model", ["attention", "compiled", "trees", "convolution", "graphed", "sharded"]
)
def test_a_killed_rank_resumes_bit_for_bit(forkrun: Forkrun, folder: Path, model: str) -> None:
    script, arguments = "gpu_train_worker.py", ["--model", model]
    settings = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "REFT_RESUME_VERIFY": "always"}
    reference = TrainJob(forkrun, folder, "reference", 1, script=script)
    reference.start(*arguments, backend="nccl", **settings)
    assert reference.wait(250) == 0, reference.said[-4000:]
    job = TrainJob(forkrun, folder, "resume", 1, max_restarts=2, script=script)
    try:
        job.start(*arguments, "--delay", "0.1", REFT_AGENT_LINGER_SEC="100", **settings)
        job.until_step(5, deadline_sec=200)
        job.kill_ranks(0)
        assert job.wait(250) == 0, job.said[-4000:]
        assert job.lines("bit-identical"), job.said[-4000:]
        assert not job.lines("NOT protected") and not job.lines("not taken"), job.said[-4000:]
        assert job.finals() == reference.finals(), job.said[-4000:]
    finally:
        job.end()
