"""A module that is given another class while it trains, as quantization and adapters do, came back with
the old one, without a word."""

from __future__ import annotations

from tests.support.killed import Runner

SCRIPT = """
class Shifted(torch.nn.Tanh):
    shift = 0.1
    def forward(self, x):
        self.calls = getattr(self, "calls", 0) + 1
        return x.relu() + self.shift
class Other(Shifted):
    shift = 0.3
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Tanh(), torch.nn.Linear(4, 2))
opt = torch.optim.SGD(model.parameters(), lr=0.05)
for k in range(12):
    opt.zero_grad()
    model(torch.full((3, 4), 0.1 * k)).square().mean().backward()
    opt.step()
    if k == 2:
        model[1].__class__, model[2].__class__ = Shifted, Other
    if k == 5:
        model[2].__class__ = torch.nn.Tanh
    if k == 9:
        model[2].__class__ = Shifted
final(*model.parameters(), classes=[type(m).__name__ for m in model], calls=[m.calls for m in model[1:3]])
"""


def test_it_comes_back_with_its_class(jobs: Runner) -> None:
    jobs.same(SCRIPT, 1, "0:8:before_seal")
    jobs.same(SCRIPT, 1, "0:11:before_seal")
