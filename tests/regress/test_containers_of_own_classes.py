"""Classes that extend list, tuple or set and yield other items than they have: a resume put back what
they yielded. And each capture called their `__len__`, which scripts may count."""

from __future__ import annotations

from tests.support.killed import Runner

HEAD = """
model = torch.nn.Linear(4, 2)
opt = torch.optim.SGD(model.parameters(), lr=0.05)
def step(k):
    opt.zero_grad()
    model(torch.full((3, 4), 0.1 * k)).square().mean().backward()
    opt.step()
"""
YIELD = HEAD + """
class Tags(set):
    off = {"b"}
    def __iter__(self):
        return (tag for tag in sorted(set.__iter__(self)) if tag not in Tags.off)
class Visible(set):
    def __iter__(self):
        return (x for x in sorted(set.__iter__(self)) if x != 2)
class Span(tuple):
    def __iter__(self):
        return iter(range(self[0], self[1]))
class Large(list):
    def __iter__(self):
        return (x for x in list.__iter__(self) if x > 2)
tags, numbers, span, large, total = Tags(["a", "b"]), Visible([1, 2, 3]), Span((0, 3)), Large([1, 5]), 0
for k in range(12):
    step(k)
    if k == 9:
        Tags.off = set()
    if k % 5 == 4:
        span = Span((k, k + 2))
    tags.add(f"x{k}")
    set.add(numbers, k + 5)
    large.append(k)
    total += sum(span)
final(*model.parameters(), tags=list(tags), numbers=sorted(set.__iter__(numbers)), total=total,
      span=tuple.__repr__(span), large=list.__repr__(large), there=set.__contains__(numbers, 2))
"""
COUNT = HEAD + """
class Counted:
    calls = 0
    def __len__(self):
        type(self).calls += 1
        return super().__len__()
class A(Counted, list): calls = 0
class B(Counted, dict): calls = 0
class C(Counted, set): calls = 0
class D(Counted, tuple): calls = 0
held = A([1]), B(x=1), C([1]), D([1])
for k in range(12):
    step(k)
    held[0].append(k)
    held[1][k] = k
    held[2].add(k)
final(*model.parameters(), calls=[kind.calls for kind in (A, B, C, D)], held=[list(one) for one in held])
"""


def test_all_items_come_back(jobs: Runner) -> None:
    jobs.same(YIELD, 1, "0:7:before_seal")


def test_their_own_methods_are_not_called(jobs: Runner) -> None:
    said = jobs.same(COUNT, 1, "0:7:before_seal")
    assert "'calls': [0, 0, 0, 0]" in said, said[-2000:]


READ_ONLY = HEAD + """
import numpy as np
means, again, tries = np.zeros(2), np.zeros(3), 0
for k in range(12):
    step(k)
    if k == 2:
        means.flags.writeable = False
    if k in (3, 6):
        again.flags.writeable = k == 6
    try:
        means += k
    except ValueError:
        tries += 1
    if again.flags.writeable:
        again += k
final(*model.parameters(), means=means.tolist(), again=again.tolist(), tries=tries)
"""


def test_arrays_that_are_read_only_stay_so(jobs: Runner) -> None:
    jobs.same(READ_ONLY, 1, "0:8:before_seal")
    jobs.same(READ_ONLY, 1, "0:5:before_seal")
