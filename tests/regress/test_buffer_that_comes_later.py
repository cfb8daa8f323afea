"""A buffer that was None at the first step was in no snapshot."""

from __future__ import annotations

from tests.support.killed import Runner

SCRIPT = """
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(8, 8)
        self.register_buffer("mean", None)
        self.calls = 0

    def forward(self, x):
        y = self.inner(x)
        self.calls += 1
        if self.calls >= 3:
            if self.mean is None:
                self.mean = torch.zeros(8)
            self.mean.mul_(0.9).add_(y.detach().mean(0) * 0.1)
        return y if self.mean is None else y - self.mean

model = Model()
opt = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(1, 13):
    loss = model(torch.randn(16, 8)).square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
final(*model.state_dict().values())
"""


def test_a_buffer_that_is_none_at_first(jobs: Runner) -> None:
    jobs.same(SCRIPT, ranks=2)
