"""Whether a script reads gradients after the optimizer step, read from its bytecode."""

from __future__ import annotations

import functools
import sys
import textwrap
import types
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from reft._continuation.bytecode import attributes_set, global_names  # noqa: E402
from reft._continuation.late_reads import late_read  # noqa: E402

HEAD = """
import functools, torch
from torch import nn
model = nn.Linear(2, 1)
def norm(m): return sum(p.grad.square().sum() for p in m.parameters())
@torch.no_grad()
def decorated(m): return [p.grad.norm() for p in m.parameters()]
def nothing(m): return [p.norm() for p in m.parameters()]
def cleared(m):
    for p in m.parameters(): p.grad = None
class Meter:
    def norm(self, m): return norm(m)
    def step(self): model.zero_grad()
    def quiet(self): pass
class Own(torch.optim.SGD):
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]: p.data.sub_(p.grad)
class Callback:
    def on_step_end(self, m): return norm(m)
class Caller:
    def __call__(self, m): return norm(m)
class Magic(dict):
    __getattr__ = dict.__getitem__
    def tick(self): pass
class Lazy:
    def __getattribute__(self, name): raise RuntimeError(name)
class Config: grad = 3
def maybe(i):
    if i > 100: model.zero_grad()
def either(i):
    if i > 100:
        model.zero_grad()
        return
    model.weight.grad.norm()
def get_total_norm(m): return sum(p.norm() for p in m.parameters())
callbacks, caller, magic, lazy, config = [Callback()], Caller(), Magic(), Lazy(), Config()
meter, own, schedule = Meter(), Own(model.parameters(), 0.1), None
def backward(): model(torch.ones(1, 2)).sum().backward()
"""
READS = {
    "a comprehension": "norms = [p.grad.norm() for p in model.parameters()]",
    "a generator expression": "total = sum(p.grad.sum() for p in model.parameters())",
    "a loop": "for p in model.parameters():\n    x = p.grad.sum()",
    "a function": "norm(model)",
    "a decorated function": "decorated(model)",
    "a partial call": "helper()",
    "a method": "meter.norm(model)",
    "a function defined in the loop's function": "inner(model)",
    "torch's clipping": "nn.utils.clip_grad_norm_(model.parameters(), 1.0)",
    "getattr": "x = [getattr(p, 'grad') for p in model.parameters()]",
    "after a read of another kind": "if model.weight.grad is not None:\n    x = model.weight.grad * 2",
    "the data of it": "x = model.weight.grad.data.norm()",
    "callbacks": "for one in callbacks:\n    one.on_step_end(model)",
    "an object that is called": "caller(model)",
    "a function that may zero them first": "maybe(step)\nnorm(model)",
    "one path of a function": "either(step)",
    "after a call that ends nothing": "meter.quiet()\nnorm(model)",
}
ENDS = {
    "nothing": "pass",
    "zeroed": "model.zero_grad()\nnorm(model)",
    "dropped": "for p in model.parameters():\n    p.grad = None\nnorm(model)",
    "dropped in a function": "cleared(model)\nnorm(model)",
    "zeroed in a method": "meter.step()\nnorm(model)",
    "zeroed in place": "for p in model.parameters():\n    if p.grad is not None:\n        p.grad.data.zero_()",
    "detached and zeroed": "for p in model.parameters():\n    p.grad.detach_()\n    p.grad.zero_()",
    "torch.autograd.grad": "x = torch.ones(1, requires_grad=True)\ntorch.autograd.grad((x * x).sum(), x)",
    "its name alone": "f = torch.autograd.grad",
    "an optimizer's step": "own.step()",
    "another function": "nothing(model)",
    "a method of torch of the same name": "model.weight.norm()",
    "the gradient of something else": "x = config.grad",
    "a function of the same name as torch's": "get_total_norm(model)",
    "a definition": "def later():\n    return model.weight.grad",
    "an object whose attributes run code": "magic.tick()\nlazy.x",
    "after the next backward": "backward()\nnorm(model)",
}


class Seen(Exception):
    """What `late_read` says at the program point, where the program ends."""


def point() -> None:
    frame = sys._getframe(1)
    there = frame.f_globals
    raise Seen(late_read(frame, [there[name] for name in ("first", "second") if name in there]))


def said(source: str) -> str:
    module = types.ModuleType("late_reads_case")
    module.__file__ = "/nowhere/late_reads_case.py"
    module.__dict__["point"] = point
    sys.modules[module.__name__] = module
    try:
        exec(compile(HEAD + source, module.__file__, "exec"), module.__dict__)  # noqa: S102
    except Seen as seen:
        return str(seen)
    finally:
        del sys.modules[module.__name__]
    raise AssertionError("no program point")


def read(after: str, names: int = 0, head: str = "") -> str:
    """With code after the program point of a loop; `names`: more names that its function has."""
    many = "".join(f"        if step < 0: unknown{i}()\n" for i in range(names))
    return said(f"""
{head}
def main():
    helper = functools.partial(norm, model)
    def inner(m): return m.weight.grad.sum()
    for step in range(2):
        backward()
{many}
        point()
{textwrap.indent(after, "        ")}
main()
""")


@pytest.mark.parametrize("names", [0, 300])
@pytest.mark.parametrize("case", READS)
def test_a_read_after_the_step_is_found(case: str, names: int) -> None:
    assert read(READS[case], names).startswith("late_reads_case.py:"), case


@pytest.mark.parametrize("names", [0, 300])
@pytest.mark.parametrize("case", ENDS)
def test_what_reads_nothing_late_is_left_alone(case: str, names: int) -> None:
    assert read(ENDS[case], names) == "", case


TWO = """
other, alone = nn.Linear(2, 1), nn.Linear(2, 1)
first, second = torch.optim.SGD(model.parameters(), 0.1), torch.optim.SGD(other.parameters(), 0.1)
class Held: pass
pair, held = [first, second], Held()
held.first, held.second = first, second
"""
READS_OF_ONE = {
    "the other one's are zeroed": "second.zero_grad()\nx = sum(p.grad.norm() for p in model.parameters())",
    "by the module": "other.zero_grad()\nx = model.weight.grad.norm()",
    "by an attribute": "held.second.zero_grad()\nnorm(model)",
    "by a subscript": "pair[1].zero_grad()\nnorm(model)",
    "of other tensors": "model.bias.grad = None\nx = model.weight.grad.norm()",
    "in place": "model.bias.grad.zero_()\nx = model.weight.grad.norm()",
    "a loop": "for p in other.parameters():\n    p.grad = None\nx = model.weight.grad.norm()",
    "two loops": "for p in other.parameters():\n    p.grad = None\nfor p in model.parameters():\n    x = p.grad.norm()",
    "the other one's backward": "second.zero_grad()\nother(torch.ones(1, 2)).sum().backward()\nnorm(model)",
    "clipped": "second.zero_grad()\nnn.utils.clip_grad_norm_(model.parameters(), 1.0)",
}
ENDS_OF_BOTH = {
    "both": "first.zero_grad()\nsecond.zero_grad()\nnorm(model)\nnorm(other)",
    "a list of them": "for one in pair:\n    one.zero_grad()\nnorm(model)",
    "attributes": "held.second.zero_grad()\nheld.first.zero_grad()\nnorm(model)",
    "modules": "model.zero_grad()\nother.zero_grad()\nnorm(model)",
    "the next one's are clipped": "second.zero_grad()\nother(torch.ones(1, 2)).sum().backward()\n"
    "nn.utils.clip_grad_norm_(other.parameters(), 1.0)\nfirst.zero_grad()",
    "read by name": "second.zero_grad()\nx = other.weight.grad.norm()\nfirst.zero_grad()",
    "loops": "for p in other.parameters():\n    p.grad = None\nfor q in model.parameters():\n    q.grad = None\nnorm(model)",
}


@pytest.mark.parametrize("case", READS_OF_ONE)
def test_a_read_of_what_another_optimizer_has_not_zeroed_is_found(case: str) -> None:
    assert read(READS_OF_ONE[case], head=TWO).startswith("late_reads_case.py:"), case


@pytest.mark.parametrize("case", ENDS_OF_BOTH)
def test_where_all_optimizers_zero_their_gradients_nothing_is_read_late(case: str) -> None:
    assert read(ENDS_OF_BOTH[case], head=TWO) == "", case


def test_one_tensor_of_the_only_optimizer_is_not_all_of_them() -> None:
    only = "first = torch.optim.SGD(model.parameters(), 0.1)\n"
    late = "model.bias.grad = None\nx = model.weight.grad.norm()"
    assert read(late, head=only).startswith("late_reads_case.py:")
    assert read("model.bias.grad = None\nmodel.weight.grad = None\nnorm(model)", head=only) == ""


def test_a_caller_that_reads_is_found() -> None:
    assert said("""
def step(): point()
def main():
    for _ in range(2):
        backward()
        step()
        norm(model)
main()
""").startswith("late_reads_case.py:")
    assert read("return") == ""


def test_the_consumer_of_a_generator_is_found() -> None:
    assert said("""
def steps():
    while True:
        model.zero_grad()
        backward()
        point()
        yield 1
def main():
    for _ in steps(): norm(model)
main()
""").startswith("late_reads_case.py:")


def code_of(function: Callable[[], Any]) -> types.CodeType:
    return function.__code__


def test_attributes_that_code_sets_are_found() -> None:
    def plain() -> None:
        sys.steps = 1  # type: ignore[attr-defined]
        functools.total += 2  # type: ignore[attr-defined]
        textwrap.x.y = 3  # type: ignore[attr-defined]
        setattr(sys, "rounds", 3)  # noqa: B010
        print(sys.argv)

    def local() -> None:
        import collections
        import os.path
        import xml.etree.ElementTree as tree
        from concurrent import futures as later

        collections.count = 4  # type: ignore[attr-defined]
        os.path.count = 5  # type: ignore[attr-defined]
        tree.count = 6  # type: ignore[attr-defined]
        later.count += 7  # type: ignore[attr-defined]

    assert attributes_set(code_of(plain)) == {
        *(("sys", "steps"), ("functools", "total"), ("textwrap.x", "y"), ("sys", "rounds"))
    }
    assert attributes_set(code_of(local)) == {
        ("import collections", "count"),
        ("import os.path", "count"),
        ("import xml.etree.ElementTree", "count"),
        ("import concurrent.futures", "count"),
    }


def test_strings_name_globals_only_where_code_looks_them_up() -> None:
    def looks() -> Any:
        return globals()["table"]

    def writes() -> None:
        global _one, _two
        _one += 1  # type: ignore[name-defined]
        _two = 2  # type: ignore[name-defined]

    def copies(arguments: Any) -> Any:
        return {"found": 1, **vars(arguments)}

    assert "table" in global_names(code_of(looks))[0]
    assert global_names(code_of(writes)) == ({"_one"}, {"_one", "_two"})
    assert "found" not in global_names(copies.__code__)[0]
