"""Weights that shared their memory at the plan, and not any more, were saved once; weights that were tied later came back untied."""

from __future__ import annotations

from tests.support.killed import Runner

SCRIPT = """
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = torch.nn.Linear(16, 16), torch.nn.Linear(16, 16)
        BEGIN

    def forward(self, x):
        return self.b(self.a(x).relu())

model = Model()
opt = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(1, 13):
    if step == 3:
        model.b.weight.data = CHANGE
    loss = (model(torch.randn(16, 16)) - 1).square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
final(*model.state_dict().values(), tied=model.a.weight.data_ptr() == model.b.weight.data_ptr())
"""


def test_untied_in_mid_run(jobs: Runner) -> None:
    script = SCRIPT.replace("BEGIN", "self.b.weight.data = self.a.weight.data")
    jobs.same(script.replace("CHANGE", "model.b.weight.data.clone()"))


def test_tied_in_mid_run(jobs: Runner) -> None:
    script = SCRIPT.replace("BEGIN", "pass").replace("CHANGE", "model.a.weight.data")
    jobs.same(script)
