"""An optimizer that puts new tensors into its state in each step had its vault planned anew in each step."""

from __future__ import annotations

from tests.support.killed import Runner

SCRIPT = """
import reft

class Momentum(torch.optim.Optimizer):
    def __init__(self, params):
        super().__init__(params, dict(lr=0.001))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state["m"] = 0.9 * state.get("m", 0) + p.grad
                p -= group["lr"] * state["m"]

model = torch.nn.Linear(8, 8)
opt = Momentum(model.parameters())
for step in range(1, 13):
    loss = model(torch.randn(16, 8)).square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
assert reft.status()["plans"] == 1, reft.status()["plans"]
final(*model.state_dict().values())
"""


def test_new_tensors_in_the_same_places_are_no_new_plan(jobs: Runner) -> None:
    jobs.same(SCRIPT)
