"""Scripts that reft disturbed, without any failure: it ran its own operations inside of their modes,
and its weak references forbade what they do with arrays and tensors."""

from __future__ import annotations

import pytest

from tests.support.killed import Runner, finals

MODES = """
import collections
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

class Functions(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.n = collections.Counter()
    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.n[getattr(function, "__name__", "?")] += 1
        return function(*args, **(kwargs or {}))

class Noise(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.generator, self.n = torch.Generator().manual_seed(1), 0
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.n += 1
        found = function(*args, **(kwargs or {}))
        if function is torch.ops.aten.addmm.default:
            found = found + 1e-3 * torch.randn(found.shape, generator=self.generator)
        torch.rand(1, generator=self.generator)
        return found

model = torch.nn.Linear(4, 2)
opt = torch.optim.SGD(model.parameters(), lr=0.05)
with Functions() as functions, Noise() as noise:
    for k in range(10):
        opt.zero_grad()
        model(torch.randn(3, 4)).square().mean().backward()
        opt.step()
final(*model.parameters(), functions=sum(functions.n.values()), noise=noise.n)
"""
RESIZED = """
import numpy as np
model = torch.nn.Linear(4, 2)
opt = torch.optim.SGD(model.parameters(), lr=0.05)
losses = np.zeros(0)
class Log:
    def __init__(self):
        self.steps = np.zeros(1)
log = Log()
for k in range(10):
    opt.zero_grad()
    loss = model(torch.full((3, 4), 0.1 * k)).square().mean()
    loss.backward()
    opt.step()
    losses.resize(k + 1, refcheck=False)
    losses[k] = loss.item()
    log.steps.resize(k + 2)
    log.steps[k + 1] = k
final(*model.parameters(), losses=losses.tolist(), steps=log.steps.tolist())
"""
SWAPPED = """
model = torch.nn.Linear(4, 2)
frozen = torch.nn.Linear(4, 2).requires_grad_(False)
opt = torch.optim.SGD(model.parameters(), lr=0.05)
one, other = torch.zeros(2), torch.ones(3)
for k in range(10):
    opt.zero_grad()
    (model(torch.full((3, 4), 0.1 * k)) - frozen(torch.ones(3, 4)).float()).square().mean().backward()
    opt.step()
    if k == 2:
        torch.utils.swap_tensors(one, other)
        torch.__future__.set_swap_module_params_on_conversion(True)
        frozen.half().float()
    one += 1
final(*model.parameters(), *frozen.parameters(), one=one.tolist(), other=other.tolist())
"""


@pytest.mark.parametrize("script", [MODES, RESIZED, SWAPPED], ids=["modes", "resized", "swapped"])
def test_they_run_as_without_reft(jobs: Runner, script: str) -> None:
    plain = jobs.run(script, REFT_DISABLE="1")
    assert finals(jobs.run(script)) == finals(plain)
    assert finals(jobs.same(script, 1, "0:6:before_seal")) == finals(plain)


ASKED = """
class Unbound:
    @property
    def __class__(self):
        raise RuntimeError("outside of its context")
proxy = Unbound()
model = torch.nn.Linear(4, 2)
opt = torch.optim.SGD(model.parameters(), lr=0.05)
total = 0
for k in range(10):
    opt.zero_grad()
    model(torch.full((3, 4), 0.1 * k)).square().mean().backward()
    opt.step()
    total += k
final(*model.parameters(), total=total)
"""


def test_an_object_that_cannot_be_asked_for_its_class_costs_the_rest_nothing(jobs: Runner) -> None:
    jobs.same(ASKED, 1, "0:6:before_seal")


VARS = """
import argparse
args = argparse.Namespace(lr=0.1)
print("config", vars(args), len(dir(args)) > 3)
model = torch.nn.Linear(4, 2)
opt = torch.optim.SGD(model.parameters(), lr=args.lr)
for k in range(10):
    opt.zero_grad()
    model(torch.full((3, 4), 0.1 * k)).square().mean().backward()
    opt.step()
    for group in opt.param_groups:
        group["lr"] *= 0.9
final(*model.parameters())
"""


def test_a_look_at_one_object_makes_no_variable_live(jobs: Runner) -> None:
    said = jobs.same(VARS, 1, "0:6:before_seal")
    assert "not restor" not in said, said[-3000:]


SPARSE = """
emb, head = torch.nn.Embedding(10, 4, sparse=True), torch.nn.Linear(4, 1)
slow = torch.optim.SparseAdam(emb.parameters(), lr=0.05)
fast = torch.optim.SGD(head.parameters(), lr=0.1)
for k in range(10):
    head(emb(torch.randint(0, 10, (6,)))).square().mean().backward()
    fast.step()
    fast.zero_grad()
    if k % 3 == 2:
        slow.step()
        slow.zero_grad()
final(*emb.parameters(), *head.parameters())
"""


def test_what_was_not_saved_is_no_part_of_what_was_resumed(jobs: Runner) -> None:
    """Gradients that are sparse and outlive a step."""
    said = jobs.run(SPARSE, 1, "0:5:before_seal")
    assert "not restored: g[" in said and "sparse" in said, said[-3000:]
    assert "place in the loop except 1 value" in said, said[-3000:]
