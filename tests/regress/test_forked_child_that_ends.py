"""A child of os.fork() that freed the session of its parent hung in the destructors of its parts."""

from __future__ import annotations

import pytest

from tests.support import ranks

# The child frees what its interpreter frees at the end, but for gloo's process group: that one hangs
# there without reft, too. Copy threads that wait are what the destructors waited for.
SCRIPT = """
import gc, os, signal
import torch, torch.distributed as dist
from reft._session import current

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
    assert len(current._owner.inherited) == 1
    current._owner.inherited.clear()
    gc.collect()
    os._exit(0)
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
    assert "child 0" in said, f"a signal ended it (14: its alarm)\n{said}"
    assert "parent 6" in said, said
