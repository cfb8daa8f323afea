"""A snapshot of tensors that had changed their strides was restored as if they had not."""

from __future__ import annotations

from tests.support.killed import Runner

SCRIPT = """
model = torch.nn.Sequential(torch.nn.Conv2d(4, 6, 3), torch.nn.ReLU(), torch.nn.Conv2d(6, 2, 3))
opt = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
for step in range(1, 13):
    if step == 3:
        model = model.to(memory_format=torch.channels_last)
    loss = model(torch.randn(4, 4, 8, 8)).square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
final(*model.state_dict().values(), strides=model[0].weight.stride())
"""


def test_channels_last_from_the_third_step_on(jobs: Runner) -> None:
    jobs.same(SCRIPT, ranks=2)
