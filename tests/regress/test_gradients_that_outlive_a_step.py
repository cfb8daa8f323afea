"""Gradients that are never zeroed came back as those of the discarded iteration."""

from __future__ import annotations

from tests.support.killed import Runner

SCRIPT = """
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 4))
opt = torch.optim.AdamW(model.parameters(), lr=0.05)
for step in range(1, 13):
    torch.manual_seed(step)
    model(torch.rand(20, 8)).sum().backward()
    opt.step()
    ZERO
final(*model.state_dict().values())
"""


def test_gradients_that_are_never_zeroed(jobs: Runner) -> None:
    said = jobs.same(SCRIPT.replace("ZERO", ""), ranks=2)
    assert "gradients of step 1 were not zeroed before the next backward pass" in said


def test_gradients_that_are_zeroed_every_few_steps(jobs: Runner) -> None:
    jobs.same(SCRIPT.replace("ZERO", "opt.zero_grad() if step % 4 == 0 else None"))


def test_gradients_that_are_zeroed_in_place_are_not_saved(jobs: Runner) -> None:
    said = jobs.run(SCRIPT.replace("ZERO", "opt.zero_grad(set_to_none=False)"))
    assert "were not zeroed" not in said
