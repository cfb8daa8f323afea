"""A learning rate that is a tensor, or a NumPy scalar, came back as that of the restarted script."""

from __future__ import annotations

from tests.support.killed import Runner

LOOP = """
for step in range(1, 13):
    loss = model(torch.randn(16, 8)).square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    UPDATE
final(*model.state_dict().values(), lr=float(opt.param_groups[0]["lr"]))
"""


def test_a_new_tensor_in_each_step(jobs: Runner) -> None:
    head = """
model = torch.nn.Linear(8, 1)
opt = torch.optim.SGD(model.parameters(), lr=torch.tensor(0.1))
"""
    update = 'opt.param_groups[0]["lr"] = opt.param_groups[0]["lr"] * 0.9'
    jobs.same(head + LOOP.replace("UPDATE", update))


def test_the_scripts_own_tensor_stays_its_own(jobs: Runner) -> None:
    head = """
model = torch.nn.Linear(8, 1)
lr = torch.tensor(0.1)
opt = torch.optim.SGD(model.parameters(), lr=lr)
"""
    jobs.same(head + LOOP.replace("UPDATE", "lr.mul_(0.9)"))


def test_a_numpy_scalar(jobs: Runner) -> None:
    head = """
import numpy as np
model = torch.nn.Linear(8, 1)
opt = torch.optim.SGD(model.parameters(), lr=0.1)
"""
    update = 'opt.param_groups[0]["lr"] = np.float32(opt.param_groups[0]["lr"] * 0.9)'
    jobs.same(head + LOOP.replace("UPDATE", update))


def test_what_a_script_attaches_to_one(jobs: Runner) -> None:
    head = """
model = torch.nn.Linear(8, 1)
opt = torch.optim.SGD(model.parameters(), lr=0.1)
opt.param_groups[0]["own"] = torch.zeros(2)  # `opt.defaults` leads to those of its class
opt.param_groups[0]["own"].age = 0
ages = []
"""
    update = """
    if step == 8:
        del opt.param_groups[0]["own"].age
    elif step < 8:
        opt.param_groups[0]["own"].age += step
    ages.append(getattr(opt.param_groups[0]["own"], "age", None))"""
    script = (head + LOOP.replace("UPDATE", update)).replace("lr=float", "ages=ages, lr=float")
    jobs.same(script, kill="0:7:before_seal")
    jobs.same(script, kill="0:11:before_seal")  # it is gone, and the restarted script has it
