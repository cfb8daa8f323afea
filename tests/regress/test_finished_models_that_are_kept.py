"""Models of finished folds were kept in a list, and a resume in a later fold made one object of the
first and the present one: a fold's result was lost without a word."""

from __future__ import annotations

import pytest

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


PLAIN = """
import copy

def main():
    models = []
    model = torch.nn.Linear(4, 2)
    for fold in range(3):
        opt = torch.optim.SGD(model.parameters(), 0.1)
        for step in range(4):
            opt.zero_grad()
            (model(torch.randn(8, 4)) - fold).square().mean().backward()
            opt.step()
        models.append(model)
        model = NEXT
    final(*(p for model in models for p in model.parameters()))

main()
"""
REFUSED = "is trained, and the one that was trained before is still held"


@pytest.mark.parametrize("then", ["torch.nn.Linear(4, 2)", "copy.deepcopy(model)"])
def test_it_is_named_before_the_kill(jobs: Runner, then: str) -> None:
    """A restart has one model when it gets there: it took the weights of the later one, and stood
    for the first one, too. That was called bit-identical."""
    said = jobs.run(PLAIN.replace("NEXT", then), 1, "0:7:before_seal", REFT_RESUME_VERIFY="always")
    before, _, after = said.partition(": kill")
    assert "not restorable from step 5 on" in before and REFUSED in before, said
    assert "place in the loop not restored" in after and "bit-identical" not in after, said


def test_models_of_one_shape_in_turn_are_named_before_the_kill(jobs: Runner) -> None:
    """A restart put the weights of one into the other."""
    both = "first, model = torch.nn.Linear(4, 2), torch.nn.Linear(4, 2)"
    script = PLAIN.replace("model = torch.nn.Linear(4, 2)", both, 1)
    script = script.replace("model = NEXT", "model, first = first, model")
    before = jobs.run(script, 1, "0:7:before_seal").partition(": kill")[0]
    assert "not restorable from step 5 on" in before, before
    assert "another model of the same shape was trained at first" in before, before


def test_each_comes_back_or_the_place_is_refused(jobs: Runner) -> None:
    undisturbed = jobs.run(SCRIPT, 2)
    killed = jobs.run(SCRIPT, 2, "0:7:before_seal", REFT_RESUME_VERIFY="off")
    is_named = REFUSED in killed
    assert is_named or finals(killed) == finals(undisturbed), killed[-3000:]
