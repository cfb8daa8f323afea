"""What a script had hung on an object of torch's came back as it was at the first step, without a
word, if it was a module, a parameter, an optimizer or an object of a package: an averaged model on
a loader, a teacher in a list on the model (it is no submodule there), a meter on an optimizer."""

from __future__ import annotations

from pathlib import Path

from tests.support.killed import Runner, finals

PACKAGE = """
class Meter:
    def __init__(self):
        self.sum, self.values = 0.0, []

    def add(self, value):
        self.sum += value
        self.values.append(value)
"""
SCRIPT = """
from torch import nn
from torch.utils.data import DataLoader, RandomSampler, TensorDataset
from package_of_meters import Meter

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.w, self.count = nn.Parameter(torch.zeros(2)), 0

def hung():
    return {
        "parameter": nn.Parameter(torch.zeros(2)),
        "linear": nn.Linear(2, 1),
        "norm": nn.BatchNorm1d(2),
        "dict": nn.ParameterDict({"a": nn.Parameter(torch.zeros(1))}),
        "own": Net(),
        "meter": Meter(),
        "list": [nn.Linear(1, 1)],
        "named": {"m": Meter(), "p": nn.Parameter(torch.zeros(1))},
        "optimizer": torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1),
        "_hidden": nn.Linear(1, 1),
    }

def tensors(item):
    if isinstance(item, torch.Tensor):
        return [item.data]
    if isinstance(item, nn.Module):
        return [t.data for t in (*item.parameters(), *item.buffers())]
    if isinstance(item, torch.optim.Optimizer):
        return [p.data for group in item.param_groups for p in group["params"]]
    if isinstance(item, (list, dict)):
        inner = item.values() if isinstance(item, dict) else item
        return [t for one in inner for t in tensors(one)]
    return []

def meters(item):
    inner = item.values() if isinstance(item, dict) else [item]
    return [one for one in inner if isinstance(one, Meter)]

core = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
model = nn.parallel.DistributedDataParallel(core)
opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
schedule = torch.optim.lr_scheduler.StepLR(opt, 3, 0.9)
data = TensorDataset(torch.randn(16, 4), torch.randn(16, 2))
sampler = RandomSampler(data, generator=torch.Generator().manual_seed(3))
loader = DataLoader(data, 4, sampler=sampler)
scaler, loss_of = torch.amp.GradScaler("cpu", enabled=False), nn.MSELoss()
hosts = [core, core[0], model, opt, schedule, loader, data, sampler, core[0].weight, scaler, loss_of]
for host in hosts:
    for name, item in hung().items():
        object.__setattr__(host, "at_" + name if name != "_hidden" else name, item)

def every():
    for host in hosts:
        for name, item in list(vars(host).items()):
            if name.startswith("at_") or name == "_hidden":
                yield item

step = 0
for epoch in range(3):
    for x, y in loader:
        step += 1
        for item in every():
            for tensor in tensors(item):
                tensor.add_(step)
            for meter in meters(item):
                meter.add(step)
        loss_of(model(x), y).backward()
        opt.step()
        opt.zero_grad()
        schedule.step()
final(
    *(tensor for item in every() for tensor in tensors(item)),
    meters=[(meter.sum, len(meter.values)) for item in every() for meter in meters(item)],
)
"""


def test_they_come_back(jobs: Runner, tmp_path: Path) -> None:
    folder = tmp_path / "site-packages"
    folder.mkdir()
    (folder / "package_of_meters.py").write_text(PACKAGE, encoding="utf-8")
    before = f"import sys; sys.path.insert(0, {str(folder)!r})"
    undisturbed = jobs.run(SCRIPT, 2, before=before)
    killed = jobs.run(SCRIPT, 2, "0:9:before_seal", before=before, REFT_RESUME_VERIFY="always")
    assert "DIFFERS" not in killed, killed[-3000:]  # it may be unverified: a snapshot was dropped
    assert finals(killed) == finals(undisturbed), killed[-3000:]


LAYERS = """
class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(4, 4)

    def forward(self, x):
        return self.inner(x)

blocks = torch.nn.Sequential(Block(), Block(), Block())
for i, block in enumerate(blocks):  # of one name, in one tree
    block.own = torch.optim.SGD([torch.nn.Parameter(torch.full((1,), float(i)))], lr=0.1)
opt = torch.optim.SGD(blocks.parameters(), lr=0.05)
for step in range(8):
    blocks(torch.ones(2, 4)).sum().backward()
    for i, block in enumerate(blocks):
        block.own.param_groups[0]["params"][0].data.add_(i * step)
    opt.step()
    opt.zero_grad()
final(*(block.own.param_groups[0]["params"][0] for block in blocks))
"""


def test_those_of_one_name_in_several_layers_stay_apart(jobs: Runner) -> None:
    undisturbed = jobs.run(LAYERS)
    killed = jobs.run(LAYERS, 1, "0:5:before_seal", REFT_RESUME_VERIFY="always")
    assert finals(killed) == finals(undisturbed), killed[-3000:]


SHADOWED = """
class Agent:
    pass

agent = Agent()
target = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 8))
agent.opt = torch.optim.Adam(target.parameters())  # found before the network, and never steps
agent.target = target
layers = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
object.__setattr__(layers[0], "base", torch.nn.Parameter(torch.zeros(2000)))
object.__setattr__(layers[1], "frozen", torch.nn.Parameter(torch.ones(300_000), False))
object.__setattr__(layers, "active", layers[0])
opt = torch.optim.SGD(layers.parameters(), lr=0.05)
for step in range(8):
    layers(torch.ones(2, 4)).sum().backward()
    for p in target.parameters():
        p.data.mul_(1.01)
    layers[0].base.data.add_(step)
    object.__setattr__(layers, "active", layers[step % 2])
    opt.step()
    opt.zero_grad()
final(*target.parameters(), layers[0].base, layers.active.weight, active=layers.active is layers[0])
"""


def test_what_is_large_comes_back_and_is_not_copied_while_it_stands_still(jobs: Runner) -> None:
    undisturbed = jobs.run(SHADOWED)
    killed = jobs.run(SHADOWED, 1, "0:5:before_seal", REFT_RESUME_VERIFY="always")
    assert finals(killed) == finals(undisturbed), killed[-3000:]
    assert "not restor" not in killed, killed[-3000:]


def test_a_module_of_python_on_a_layer(jobs: Runner) -> None:
    """It was gone, and the restarted script failed where it used it."""
    jobs.same(
        """
import math
model = torch.nn.Sequential(torch.nn.Linear(4, 4))
opt = torch.optim.SGD(model.parameters(), 0.05)
for step in range(1, 10):
    if step == 3:
        model[0].functions = math
    opt.zero_grad()
    factor = model[0].functions.cos(step) if step > 3 else 1
    (model(torch.randn(4, 4)).square().mean() * factor).backward()
    opt.step()
final(*model.parameters())
"""
    )


def test_a_class_of_the_script_on_a_layer_and_on_a_loader(jobs: Runner) -> None:
    """They were gone, and the restarted script failed where it used one."""
    jobs.same(
        """
class Count:
    of = 0
class Sum:
    of = 0
model = torch.nn.Sequential(torch.nn.Linear(4, 4))
opt = torch.optim.SGD(model.parameters(), 0.05)
loader = torch.utils.data.DataLoader(torch.randn(16, 4), 4)
step = 0
for epoch in range(3):
    for x in loader:
        step += 1
        if step == 3:
            loader.kind, model[0].kind = Count, Sum
        if step > 3:
            loader.kind.of += step
            model[0].kind.of += loader.kind.of
        opt.zero_grad()
        (model(x).square().mean() * (1 + Sum.of * 0.01)).backward()
        opt.step()
final(*model.parameters(), count=Count.of, sum=Sum.of)
"""
    )
