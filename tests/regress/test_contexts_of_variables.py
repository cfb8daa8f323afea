"""A resume silently restored a copy of a context (`copy_context`) as it was at first, and a report
named a `with localcontext()` block in internal words."""

from __future__ import annotations

from tests.support.killed import Runner

LOOP = """
model = torch.nn.Linear(4, 2)
opt = torch.optim.SGD(model.parameters(), lr=0.05)
def train(scale):
    opt.zero_grad()
    (model(torch.randn(3, 4)) * scale).square().mean().backward()
    opt.step()
"""
COPIED = LOOP + """
import contextvars
heat, seen = contextvars.ContextVar("heat", default=1.0), contextvars.ContextVar("seen")
held = contextvars.copy_context()
held.run(seen.set, [])
def cool():
    heat.set(heat.get() * 0.9)
    seen.get().append(heat.get())
for step in range(12):
    train(held.get(heat, 1.0))
    held.run(cool)
final(*model.parameters(), heat=held[heat], seen=held[seen], outside=heat.get())
"""
DECIMALS = LOOP + """
from decimal import Decimal, localcontext
total = Decimal(1)
with localcontext() as numbers:
    numbers.prec = 4
    for step in range(12):
        train(float(total))
        numbers.prec += 1
        total = total / 3 + 1
final(*model.parameters(), total=total, after=Decimal(1) / 3)
"""
IN_EACH = LOOP + """
from decimal import Decimal, localcontext
for step in range(12):
    with localcontext():
        train(float(Decimal(1) / 3))
final(*model.parameters())
"""


def test_a_copy_of_a_context_comes_back(jobs: Runner) -> None:
    jobs.same(COPIED, 1, "0:8:before_seal")


def test_a_block_of_decimals_comes_back(jobs: Runner) -> None:
    said = jobs.same(DECIMALS, 1, "0:8:before_seal")
    assert "not restorable" not in said, said[-3000:]


def test_one_that_is_entered_in_each_iteration_is_named(jobs: Runner) -> None:
    said = jobs.run(IN_EACH, 1, "0:8:before_seal")
    named = "the `with localcontext()` block in <module> (decimal.ContextManager): the context that comes back at its end"
    assert named in said[: said.index("resuming at")], said[-3000:]
