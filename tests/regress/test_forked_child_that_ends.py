"""A child of os.fork() that ended by itself hung in the destructors of its parent's session."""

from __future__ import annotations

import pytest

from tests.support import ranks

# The interpreter of the child frees what it has inherited. Copy threads that wait, and votes that
# nobody answers, are what the destructors would wait for.
SCRIPT = """
import os, signal, sys
import torch, torch.distributed as dist

dist.init_process_group("reft")
model = torch.nn.Linear(64, 64)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


def train(steps):
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(8, 64)).square().mean().backward()
        optimizer.step()


train(3)
if (child := os.fork()) == 0:
    signal.alarm(30)
    sys.exit(0)
print("child", os.waitpid(child, 0)[1], flush=True)
train(3)
print("parent", __import__("reft").snapshot_now(), flush=True)
dist.destroy_process_group()
"""


@pytest.mark.timeout(180)
def test_the_child_ends_and_the_parent_trains_on() -> None:
    with ranks.bench(REFT_SNAPSHOT_THREADS="3") as bench:
        script = bench.folder / "job.py"
        script.write_text(SCRIPT)
        said = bench.ranks(world=1, script=script)
    assert "child 0" in said, f"14: its alarm ended it\n{said}"
    assert "parent 6" in said, said
