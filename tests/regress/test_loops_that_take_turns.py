"""Loops that Python calls in turn, or for one item at a time."""

from __future__ import annotations

from tests.support.killed import Runner

IN_TURN = """
def train(model, k):
    for i in range(8):
        opt.zero_grad()
        (model(torch.randn(4, 4) + k)).square().mean().backward()
        opt.step()
        yield i

models = [torch.nn.Linear(4, 4) for _ in range(2)]
opt = torch.optim.SGD([p for model in models for p in model.parameters()], 0.05)
loops = [train(model, k) for k, model in enumerate(models)]
while loops:
    loop = loops.pop(0)
    if next(loop, None) is not None:
        loops.append(loop)
final(*[p for model in models for p in model.parameters()])
"""

ONE_AFTER_THE_OTHER = IN_TURN.replace("loops.append(loop)", "loops.insert(0, loop)")

IN_CONTAINS = """
class Box:
    def __contains__(self, k):
        opt.zero_grad()
        (model(torch.randn(4, 4) + k)).square().mean().backward()
        opt.step()
        return k % 2 == 0

model = torch.nn.Linear(4, 4)
opt = torch.optim.SGD(model.parameters(), 0.05)
box, hits = Box(), []
for k in range(12):
    if k in box:
        hits.append(k)
final(*model.parameters(), hits=hits)
"""

IN_ITER = IN_CONTAINS.replace("def __contains__(self, k):\n", "def __iter__(self):\n        k = 1\n").replace(
    "return k % 2 == 0", "yield 1"
)
REFUSED = "the training loop runs in another generator than in the first iteration"


def test_generators_in_turn_are_refused_before_the_kill(jobs: Runner) -> None:
    """They were at the resume only."""
    assert REFUSED in jobs.run(IN_TURN)


def test_a_generator_that_waits_is_no_hindrance_while_the_first_one_runs(jobs: Runner) -> None:
    said = jobs.same(ONE_AFTER_THE_OTHER)
    assert REFUSED not in said[: said.index("resumed at")], said


def test_a_question_is_no_loop(jobs: Runner) -> None:
    """`in` was taken for a loop over items although `__contains__` answers it."""
    said = jobs.same(IN_CONTAINS, REFT_RESUME_VERIFY="always")
    assert "bit-identical" in said, said


def test_a_search_is_a_loop(jobs: Runner) -> None:
    assert "C code consumes an iterable" in jobs.run(IN_ITER)
