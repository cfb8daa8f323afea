"""A zero that became a negative one was taken for the zero of the beginning, and not restored."""

from __future__ import annotations

from tests.support.killed import Runner

SCRIPT = """
import enum, logging
class Mode(enum.Enum):
    A = 1
class Config:
    bias, scale = 0.0, 0j
def keyed(): pass
Mode.A.z = keyed.z = logging.z = 0.0
model = torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.LeakyReLU(0.0))
model[0].z = model[0].weight.z = 0.0
opt = torch.optim.SGD(model.parameters(), lr=0.05)
for k in range(12):
    opt.zero_grad()
    model(torch.full((3, 4), 0.1 * k)).square().mean().backward()
    opt.step()
    if k == 3:
        Mode.A.z = keyed.z = logging.z = Config.bias = -0.0
        Config.scale = complex(0.0, -0.0)
        model[0].z = model[0].weight.z = model[1].negative_slope = -0.0
seen = (Mode.A.z, keyed.z, logging.z, Config.bias, Config.scale, model[0].z, model[0].weight.z,
        model[1].negative_slope)
final(*model.parameters(), seen=repr(seen))
"""


def test_they_come_back(jobs: Runner) -> None:
    jobs.same(SCRIPT, 1, "0:8:before_seal")
