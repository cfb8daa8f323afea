"""Parameters collected over a set came back in each other's places: they were called by their position."""

from __future__ import annotations

from tests.support.killed import Runner

SCRIPT = """
model = torch.nn.Sequential(*[torch.nn.Linear(16, 16) for _ in range(4)])
# As a set of names may give them, in another order in each process.
order = sorted(model.parameters(), key=id, reverse=attempt > 0)
order = order if attempt == 0 else order[1:] + order[:1]
opt = torch.optim.SGD(order, lr=0.05, momentum=0.9)
for step in range(1, 13):
    loss = (model(torch.randn(16, 16)) - 1).square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
final(*model.state_dict().values())
"""


def test_another_order_after_the_restart(jobs: Runner) -> None:
    jobs.same(SCRIPT, ranks=2)
