"""Optimizers that step in turn, each for a while (a population, one for each client), came back
exchanged, without a word: the restarted script noted where objects stand at another step than the
one before."""

from __future__ import annotations

import pytest

from tests.support.killed import Runner

POPULATION = """
models = [torch.nn.Linear(4, 4) for _ in range(3)]
optimizers = [torch.optim.Adam(model.parameters(), 0.01) for model in models]
for generation in range(6):
    for model, opt in zip(models, optimizers):
        for _ in range(3):
            opt.zero_grad()
            (model(torch.randn(8, 4)) - 1).square().mean().backward()
            opt.step()
steps = [int(opt.state_dict()["state"][0]["step"]) for opt in optimizers]
final(*[p for model in models for p in model.parameters()], steps=steps)
"""

CLIENTS = """
model = torch.nn.Linear(4, 4)
optimizers = []
for client in range(6):
    opt = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    KEEP
    for _ in range(4):
        opt.zero_grad()
        (model(torch.randn(8, 4)) - 1).square().mean().backward()
        opt.step()
final(*model.parameters())
"""


@pytest.mark.parametrize("step", [5, 6, 7, 8, 9, 11])
def test_a_population_comes_back(jobs: Runner, step: int) -> None:
    said = jobs.same(POPULATION, kill=f"0:{step}:before_seal", REFT_RESUME_VERIFY="always")
    assert "is not exact" not in said and "DIFFERS" not in said, said


@pytest.mark.parametrize("keep", ["optimizers.append(opt)", "pass"])
@pytest.mark.parametrize("step", [5, 8, 9])
def test_one_for_each_client_comes_back(jobs: Runner, step: int, keep: str) -> None:
    said = jobs.same(
        CLIENTS.replace("KEEP", keep), kill=f"0:{step}:before_seal", REFT_RESUME_VERIFY="always"
    )
    assert "is not exact" not in said and "DIFFERS" not in said, said


def test_loops_of_several_steps_are_put_back_at_each(jobs: Runner) -> None:
    """The optimizer that ends iterations steps in two places."""
    jobs.same(TWO_PLACES, kill="0:7:before_seal")
    jobs.same(TWO_PLACES, kill="0:8:before_seal")


TWO_PLACES = """
model, other = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
opt = torch.optim.Adam(model.parameters(), 0.01)
late = torch.optim.Adam(other.parameters(), 0.01)

def loss(net):
    return (net(torch.randn(8, 4)) - 1).square().mean()

for step in range(8):
    late.zero_grad()
    loss(other).backward()
    late.step()
    opt.zero_grad()
    loss(model).backward()
    opt.step()
    opt.zero_grad()
    (loss(model) + model.weight.norm()).backward()
    opt.step()
final(*model.parameters(), *other.parameters())
"""


TWO_LOOPS = """
model = torch.nn.Linear(4, 4)

def loss():
    return (model(torch.randn(8, 4)) - 1).square().mean()

def first():
    opt = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for _ in range(5):
        opt.zero_grad()
        loss().backward()
        opt.step()

def second():
    opt = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    for _ in range(8):
        opt.zero_grad()
        loss().backward()
        opt.step()

first()
second()
final(*model.parameters())
"""


@pytest.mark.parametrize("step", [3, 7, 10])
def test_a_second_loop_with_an_optimizer_of_its_own_comes_back(jobs: Runner, step: int) -> None:
    said = jobs.same(TWO_LOOPS, kill=f"0:{step}:before_seal", REFT_RESUME_VERIFY="always")
    assert "is not exact" not in said and "DIFFERS" not in said, said
    assert "not restorable" not in said and "NOT protected" not in said, said


@pytest.mark.parametrize("script", [TWO_LOOPS, POPULATION], ids=["two loops", "population"])
def test_two_restarts_in_a_row_come_back(jobs: Runner, script: str) -> None:
    """The second one knows the steps of the first process."""
    again = """
from torch.optim.optimizer import register_optimizer_step_pre_hook
steps = 0
def count(*_):
    global steps
    steps += 1
    if os.environ.get("TORCHELASTIC_RESTART_COUNT") == "1" and steps == 10:
        os.kill(os.getpid(), 9)
register_optimizer_step_pre_hook(count)
"""
    said = jobs.same(again + script, kill="0:3:before_seal")
    assert said.count("reft: resuming at") == 2, said


def test_an_optimizer_that_is_used_late_is_not_named(jobs: Runner) -> None:
    said = jobs.run(
        """
model, other = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
optimizers = [torch.optim.SGD(net.parameters(), 0.1) for net in (model, other)]
for net, opt in zip((model, other), optimizers):
    for _ in range(70):
        opt.zero_grad()
        net(torch.randn(8, 4)).square().mean().backward()
        opt.step()
final(*model.parameters(), *other.parameters())
"""
    )
    assert "NOT protected" not in said and "not restorable" not in said, said


def test_optimizers_from_before_the_process_group_are_there_at_once(jobs: Runner) -> None:
    """They have no number when the first one steps: it was called late, and not protected."""
    made, rest = POPULATION.split("for generation", 1)
    said = jobs.same("for generation" + rest, before="torch.manual_seed(1)" + made)
    assert "NOT protected" not in said, said
    assert "when the first optimizer step returns" in said, said


def test_one_that_is_made_late_is_named(jobs: Runner) -> None:
    said = jobs.run(CLIENTS.replace("KEEP", "optimizers.append(opt)").replace("range(4)", "range(40)"))
    assert "optimizer 2 (SGD): made so late that a restarted script" in said, said
