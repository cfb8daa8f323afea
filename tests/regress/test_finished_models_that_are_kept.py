"""Models of finished folds were kept in a list, and a resume in a later fold made one object of the
first and the present one: a fold's result was lost without a word."""

from __future__ import annotations

from tests.support.killed import Runner, finals

SCRIPT = """
from torch.nn.parallel import DistributedDataParallel

def run_fold(fold):
    torch.manual_seed(fold)
    model = DistributedDataParallel(torch.nn.Linear(4, 2))
    opt = torch.optim.Adam(model.parameters(), 1e-2)
    for step in range(4):
        opt.zero_grad()
        (model(torch.randn(8, 4)) - 1).square().mean().backward()
        opt.step()
    return model

models = []
for fold in range(3):
    models.append(run_fold(fold))
final(*(p for model in models for p in model.parameters()))
"""


def test_each_comes_back_or_the_place_is_refused(jobs: Runner) -> None:
    undisturbed = jobs.run(SCRIPT, 2)
    killed = jobs.run(SCRIPT, 2, "0:7:before_seal", REFT_RESUME_VERIFY="off")
    is_named = "the one that stood there is still held" in killed
    assert is_named or finals(killed) == finals(undisturbed), killed[-3000:]
