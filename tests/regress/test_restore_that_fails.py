"""A restore that ended its rank was tried again by every attempt, until the launcher gave up."""

from __future__ import annotations

from tests.support.killed import Runner, finals

SCRIPT = """
import reft._resume.restorer as restorer

def failing(*arguments):
    raise OSError("no")

if attempt == 1:
    restorer.restore = failing
model = torch.nn.Linear(16, 16)
opt = torch.optim.Adam(model.parameters(), lr=0.01)
for step in range(1, 13):
    loss = (model(torch.randn(16, 16)) - 1).square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
final(*model.state_dict().values(), step=step)
"""


def test_the_older_step_is_resumed_instead(jobs: Runner) -> None:
    undisturbed = jobs.run(SCRIPT)
    said = jobs.run(SCRIPT, kill="0:6:after_commit")
    text = " ".join(said.split())
    assert "restore failed: no" in text, said
    assert "an attempt ended while it restored step 6: step 5, the one before it, is resumed" in text, said
    assert "resumed at step 5" in text and finals(said) == finals(undisturbed), said
