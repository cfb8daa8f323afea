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


GATHERED = """
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
often = torch.optim.Adam(model[0].parameters(), 0.02)
rarely = torch.optim.SGD(model[1].parameters(), 0.05)
for step in range(1, 15):
    model(torch.randn(4, 4)).square().mean().backward()
    often.step()
    often.zero_grad()
    if step % 4 == 0:
        rarely.step()
        rarely.zero_grad()
final(*model.state_dict().values())
"""


def test_gradients_of_an_optimizer_that_has_not_stepped_yet(jobs: Runner) -> None:
    jobs.same(GATHERED, kill="0:3:before_seal")


def test_a_resume_just_before_they_outlive_a_step_is_not_called_exact(jobs: Runner) -> None:
    script = SCRIPT.replace("ZERO", "opt.zero_grad() if step < 6 else None")
    said = jobs.run(script, kill="0:7:before_seal")
    assert "the resume is not exact: the snapshot of step 6 has no gradients" in said
    said = jobs.run(script, kill="0:6:before_seal")
    assert "not exact" not in said


OTHERS_ZEROED = """
first, second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 2)
opts = [torch.optim.Adam(m.parameters(), lr=0.01) for m in (first, second)]
one, two = opts
norms = []
for k in range(12):
    two.zero_grad()
    second(first(torch.full((3, 4), 0.1 * k)).detach()).square().mean().backward()
    two.step()
    one.zero_grad()
    second(first(torch.full((3, 4), 0.2 * k))).square().mean().backward()
    one.step()
    two.zero_grad()
    norms.append(sum(p.grad.norm().item() for p in first.parameters()).hex())
final(*first.parameters(), *second.parameters(), norms=norms)
"""


def test_gradients_are_read_after_those_of_another_optimizer_are_zeroed(jobs: Runner) -> None:
    """As a GAN logs the norm of the one's gradients once it has zeroed the other one's."""
    said = jobs.same(OTHERS_ZEROED, 1, "0:8:before_seal")
    assert "reads gradients after the optimizer step" in said, said[-2000:]
