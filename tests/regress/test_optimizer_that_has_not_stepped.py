"""Settings of an optimizer that has not stepped yet came back as the restarted script's, so its
schedule went on from the wrong rate."""

from __future__ import annotations

from tests.support.killed import Runner

SCRIPT = """
class Gan:
    def __init__(self):
        self.g, self.d = torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)
        groups = [{"params": [self.d.weight]}, {"params": [self.d.bias], "lr": 0.5}]
        self.opts = {"g": torch.optim.Adam(self.g.parameters(), 0.02),
                     "d": torch.optim.SGD(groups, 0.02, momentum=0.9)}
        self.schedules = [torch.optim.lr_scheduler.ExponentialLR(o, 0.9)
                          for o in self.opts.values()]

    def train(self):
        for step in range(1, 13):
            x = torch.randn(4, 4)
            y = self.g(x)
            self.opts["g"].zero_grad()
            (y - x).square().mean().backward()
            self.opts["g"].step()
            for group in self.opts["d"].param_groups:
                group["momentum"] *= 0.97
                group["since"] = step
            if step > 9:
                self.opts["d"].zero_grad()
                self.d(y.detach()).square().mean().backward()
                self.opts["d"].step()
            for schedule in self.schedules:
                schedule.step()

gan = Gan()
gan.train()
final(*gan.g.state_dict().values(), *gan.d.state_dict().values(),
      groups=[{k: v for k, v in g.items() if k != "params"} for g in gan.opts["d"].param_groups])
"""


def test_its_settings_come_back(jobs: Runner) -> None:
    jobs.same(SCRIPT)
