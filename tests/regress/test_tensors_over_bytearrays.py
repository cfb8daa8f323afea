"""A resume silently restored a bytearray and a tensor over it (`torch.frombuffer`) as two copies."""

from __future__ import annotations

from tests.support.killed import Runner

SCRIPT = """
import numpy as np
room = bytearray(32)
over, also = torch.frombuffer(room, dtype=torch.float32), np.frombuffer(room, np.uint8)
model = torch.nn.Linear(4, 2)
opt = torch.optim.SGD(model.parameters(), lr=0.05)
for step in range(12):
    opt.zero_grad()
    (model(torch.randn(3, 4)) * over[0]).square().mean().backward()
    opt.step()
    over[step % 8] += 0.5
    room[7] = step
    also[9] += 1
final(*model.parameters(), room=room.hex(), over=over.tolist(), also=also.tolist())
"""
LARGE = SCRIPT.replace("bytearray(32)", "bytearray(1 << 17)").replace("room=room.hex(), over=over.tolist(), also=also.tolist()", "")


def test_they_share_their_memory_again(jobs: Runner) -> None:
    said = jobs.same(SCRIPT, 1, "0:8:before_seal")
    assert "not restorable" not in said, said[-3000:]


def test_large_ones_that_will_not_are_named(jobs: Runner) -> None:
    said = jobs.run(LARGE, 1, "0:8:before_seal")
    named = "<module>:room (bytearray): shares its memory with a tensor or an array"
    assert named in said[: said.index("resuming at")], said[-3000:]
