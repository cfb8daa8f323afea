"""Optimizer steps inside a function given to torch.compile were never seen, and reft said so after
two minutes."""

from __future__ import annotations

from tests.support.killed import Runner

SCRIPT = """
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 4))
opt = torch.optim.AdamW(model.parameters(), lr=0.02)
average = [p.detach().clone() for p in model.parameters()]

@torch.compile(backend="eager")
def train_step(x):
    loss = (model(x) - x.roll(1, 1)).square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    with torch.no_grad():
        for a, p in zip(average, model.parameters()):
            a.mul_(0.9).add_(p, alpha=0.1)
    return loss

def main():
    history = []
    for step in range(1, 11):
        loss = train_step(torch.randn(6, 4))
        history.append(loss.item())
    final(*model.state_dict().values(), *average, history=history)

main()
"""


def test_they_end_when_the_function_returns(jobs: Runner) -> None:
    said = jobs.same(SCRIPT)
    assert "an optimizer steps inside a function given to torch.compile" in said
