"""State of an optimizer that was not {parameter: {name: tensor}} came back as the restarted script's, or was pickled anew, tensors and all, in each step."""

from __future__ import annotations

from tests.support.killed import Runner

SCRIPT = """
class Own(torch.optim.Optimizer):
    def __init__(self, params):
        super().__init__(params, dict(lr=0.1))

    @torch.no_grad()
    def step(self, closure=None):
        state = self.state
        state["k"] = state.get("k", 0) + 1
        if "avg" not in state:
            state["avg"] = torch.zeros(())
            state["nested"] = {"seen": [], "by": {}}
        for group in self.param_groups:
            for p in group["params"]:
                state["avg"].mul_(0.9).add_(p.grad.norm() * 0.1)
                if state["k"] in (2, 5):
                    state["nested"]["seen"].append(p.grad.norm())
                    state["nested"]["by"][p] = (state["k"], p.grad.clone())
                state[p] = p.grad.sign() if state["k"] % 2 else p.grad
                p.sub_(state[p] * group["lr"] / state["k"] / (1 + state["avg"]))
                for _, g in [state["nested"]["by"][p]] if p in state["nested"]["by"] else []:
                    p.sub_(g, alpha=0.01)

model = torch.nn.Linear(8, 1)
opt = Own(model.parameters())
for step in range(1, 13):
    loss = model(torch.randn(16, 8)).square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
seen = [float(one) for one in opt.state["nested"]["seen"]]
final(*model.state_dict().values(), k=opt.state["k"], avg=float(opt.state["avg"]), seen=seen)
"""

LBFGS = """
import reft
model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(4)])
opt = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=2, history_size=4)
x = torch.randn(4, 64)

def closure():
    opt.zero_grad()
    loss = (model(x) - 1).square().mean()
    loss.backward()
    return loss

for step in range(1, 10):
    opt.step(closure)
assert reft.status()["object_bytes"] < 64 << 10, reft.status()["object_bytes"]
final(*model.state_dict().values())
"""


def test_keys_that_are_no_parameters_and_nested_containers(jobs: Runner) -> None:
    jobs.same(SCRIPT)


def test_the_history_of_lbfgs_is_copied_as_tensors(jobs: Runner) -> None:
    jobs.same(LBFGS)
