"""Exceptions of a script lost what their classes keep in C; some made reft refuse the place in the
loop."""

from __future__ import annotations

from tests.support.killed import Runner

SCRIPT = """
class Need(Exception):
    def __new__(cls, value):
        return super().__new__(cls, value)
    def __init__(self, value):
        self.value = value

def raised(step):
    try:
        match step:
            case 1: b"\\xff".decode("ascii")
            case 2: open("/nonexistent/x")
            case 3: {}["key"]
            case 4: raise StopIteration(5)
            case 5: raise ExceptionGroup("two", [ValueError(1), OSError(2, "none", "f")])
            case 6: raise Need(7)
            case 7: import no_such_module
            case 8: compile("1 +", "some.py", "exec")
            case _: raise SystemExit(step)
    except BaseException as error:
        return error.with_traceback(None)

def seen(error):
    names = ("errno", "filename", "start", "end", "reason", "value", "code", "name", "lineno", "text")
    inner = [seen(one) for one in getattr(error, "exceptions", ())]
    return type(error).__name__, str(error), [repr(getattr(error, name, None)) for name in names], inner

model = torch.nn.Linear(4, 2)
opt = torch.optim.SGD(model.parameters(), lr=0.05)
kept = []
for step in range(14):
    opt.zero_grad()
    model(torch.randn(3, 4)).square().mean().backward()
    opt.step()
    kept.append(raised(step))
final(*model.parameters(), kept=[seen(error) for error in kept])
"""


def test_they_come_back_as_they_were(jobs: Runner) -> None:
    said = jobs.same(SCRIPT, 1, "0:11:before_seal")
    assert "not restor" not in said, said[-3000:]


# Without arguments, its class does not make such a group.
NOT_MADE = """
model = torch.nn.Linear(4, 2)
opt = torch.optim.SGD(model.parameters(), lr=0.05)
odd, count = None, 0
for step in range(12):
    opt.zero_grad()
    model(torch.randn(3, 4)).square().mean().backward()
    opt.step()
    count += 1
    if step == 3:
        odd = ExceptionGroup("two", [ValueError(1)])
        odd.args = ()
last = odd  # a variable that is not read is not saved
final(*model.parameters(), count=count)
"""


def test_one_that_cannot_be_made_costs_nothing_else(jobs: Runner) -> None:
    said = jobs.same(NOT_MADE, 1, "0:8:before_seal")
    assert "cannot make it: TypeError" in said, said[-3000:]
