"""One object that cannot be saved or restored ended the protection of all, or every attempt."""

from __future__ import annotations

from tests.support.killed import Runner

LOOP = """
for step in range(1, 13):
    loss = model(torch.randn(16, 8)).square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    AFTER
final(*model.state_dict().values(), lr=float(opt.param_groups[0]["lr"]))
"""
SCHEDULER = """
from dataclasses import dataclass
model = torch.nn.Linear(8, 1)
opt = torch.optim.SGD(model.parameters(), lr=0.1)

@dataclass
class Settings:  # this class exists only after init_process_group
    gamma: float = 0.9

class Own(torch.optim.lr_scheduler.LRScheduler):
    def __init__(self, opt, settings, function):
        self.settings, self.function = settings, function
        super().__init__(opt)

    def get_lr(self):
        return [b * self.function(self.settings, self.last_epoch) for b in self.base_lrs]

sched = Own(opt, Settings(), lambda settings, epoch: settings.gamma ** epoch)
"""
REGISTERED = """
import reft

class Counter:
    def state_dict(self):
        return {"n": 1}

    def load_state_dict(self, values):
        raise KeyError("history")

reft.register("counter", Counter())
model = torch.nn.Linear(8, 1)
opt = torch.optim.SGD(model.parameters(), lr=0.1)
"""
LAZY = """
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.unused = torch.nn.Linear(8, 1), torch.nn.LazyLinear(4)

    def forward(self, x):
        return self.used(x)

model = Model()
opt = torch.optim.SGD(model.parameters(), lr=0.1)
"""


def test_a_lambda_in_a_scheduler_and_a_class_that_comes_later(jobs: Runner) -> None:
    jobs.same(SCHEDULER + LOOP.replace("AFTER", "sched.step()"))


def test_a_registered_object_that_refuses_its_state(jobs: Runner) -> None:
    said = jobs.same(REGISTERED + LOOP.replace("AFTER", "pass"))
    assert "not restored: registered object counter: KeyError: 'history'" in said


def test_a_module_that_was_never_used(jobs: Runner) -> None:
    loop = LOOP.replace("AFTER", "pass").replace(
        "*model.state_dict().values()", "model.used.weight"
    )
    said = jobs.same(LAZY + loop)
    assert "NOT protected: m0.unused.weight: not initialized yet" in said
