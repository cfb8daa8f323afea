"""Two nodes with two ranks and one, which `--nnodes` allows: nodes were counted as if all had the
size of the first."""

from __future__ import annotations

import pytest

from tests.support import ranks
from tests.support.launchers import free_port, torchrun


@pytest.mark.timeout(400)
def test_uneven_nodes_commit_and_continue() -> None:
    port = free_port()
    with ranks.bench() as bench:
        launchers = []
        for node, size in enumerate((2, 1)):
            options = ["--nnodes=2", f"--node-rank={node}", "--max-restarts=1", "--rdzv-id=uneven",
                       "--monitor-interval=0.2", "--rdzv-backend=c10d",
                       f"--rdzv-endpoint=127.0.0.1:{port}"]  # fmt: skip
            arguments = ("--kill", "2:5", "--steps", "12")
            command = torchrun(ranks.TRAINING, *arguments, ranks=size, options=options)
            launchers.append(bench.start_command(command))
        said = ranks.said_by(launchers)
    assert ranks.committed(said) == [12, 12, 12], said
    assert ranks.resumed_at(said) in ([5], [6]), said
    assert len(set(ranks.job_ids(said))) == 1
