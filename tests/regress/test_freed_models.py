"""Models and optimizers stayed alive after the process group was destroyed."""

from __future__ import annotations

from tests.support.killed import Runner

SCRIPT = """
import gc, weakref

def train():
    model = torch.nn.Linear(8, 8)
    opt = torch.optim.Adam(model.parameters())
    for step in range(1, 6):
        loss = model(torch.randn(16, 8)).square().mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
    return [weakref.ref(model), weakref.ref(opt), weakref.ref(model.weight)]

left = train()
dist.destroy_process_group()
gc.collect()
print("LEFT", [ref() is not None for ref in left], flush=True)
"""


def test_nothing_is_left_after_the_group_is_destroyed(jobs: Runner) -> None:
    assert "LEFT [False, False, False]" in jobs.run(SCRIPT)
