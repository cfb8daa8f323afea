"""A resume silently restored functions as they were at first that torch's own hooks call
(`register_multi_grad_hook`), or nodes of autograd."""

from __future__ import annotations

import pytest

from tests.support.killed import Runner

SCRIPT = """
from torch.nn.parallel import DistributedDataParallel as DDP
def counter():
    n, total = 0, 0.0
    def count(*gradients):
        nonlocal n, total
        n += 1
        found = gradients[-1][0] if isinstance(gradients[-1], (tuple, list)) else gradients[-1]
        total += float(found.sum())
        heard[:] = [n, total]
    return count
heard = []
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 2))
EARLY
model = DDP(model)
opt = torch.optim.SGD(model.parameters(), lr=0.05)
LATE
for step in range(12):
    opt.zero_grad()
    loss = model(torch.randn(3, 4)).square().mean()
    loss.grad_fn.register_hook(lambda *_: None)
    loss.backward()
    opt.step()
final(*model.parameters(), heard=heard)
"""
NODE = "node = (p := list(model.parameters())[1]).expand_as(p).grad_fn.next_functions[0][0]\n"
HOOKS = {
    "all": ("", "torch.autograd.graph.register_multi_grad_hook(list(model.parameters()), counter())"),
    "any": ("", "torch.autograd.graph.register_multi_grad_hook(list(model.parameters()), counter(), mode='any')"),
    "node": ("", NODE + "node.register_hook(counter())"),
    "before a node": ("", NODE + "node.register_prehook(counter())"),
    "node, earlier": (NODE + "node.register_hook(counter())", ""),
}


@pytest.mark.parametrize("name", HOOKS)
def test_what_hooks_keep_comes_back(jobs: Runner, name: str) -> None:
    early, late = HOOKS[name]
    said = jobs.same(SCRIPT.replace("EARLY", early).replace("LATE", late), 1, "0:8:before_seal")
    assert "not restorable" not in said and "place in the loop except" not in said, said[-3000:]


def test_one_that_comes_later_is_named(jobs: Runner) -> None:
    script = SCRIPT.replace("EARLY", "").replace("LATE", NODE)
    script = script.replace("    opt.step()\n", "    opt.step()\n    if step == 1: node.register_hook(counter())\n")
    said = jobs.run(script, 1, "0:8:before_seal")
    named = "torch.<hook of autograd node"
    assert named in said[: said.index("resuming at")], said[-3000:]
    assert "place in the loop except" in said, said[-3000:]
