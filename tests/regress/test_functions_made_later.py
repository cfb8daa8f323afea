"""A function with state that came into a container after the first step was named at the restart
only, when its state was lost."""

from __future__ import annotations

import pytest

from tests.support.killed import Runner

SCRIPT = """
import contextlib
log, held, stack, box = [], [], contextlib.ExitStack(), {"a": None}

def main():
    model = torch.nn.Linear(4, 2)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(1, 10):
        if step == 4:
            ADD
        model(torch.full((3, 4), len(log) + 0.1 * step)).square().mean().backward()
        opt.step()
        opt.zero_grad()
    final(model.weight)

def counter(start):
    def count():
        nonlocal start
        start += 1
        log.append(start)
    return count

main()
"""
LATER = "not restorable from step 4 on: "


@pytest.mark.parametrize(
    ("add", "where"),
    [
        ("held.append(counter(step))", "held[0]"),
        ("stack.callback(counter(step))", "stack._exit_callbacks[0][1]"),
        ("box['a'] = counter(step)", "box['a']"),
        ("held.append([{'f': counter(step)}])", "held[0][0]['f']"),
    ],
)
def test_it_is_named_before_the_kill(jobs: Runner, add: str, where: str) -> None:
    said = jobs.run(SCRIPT.replace("ADD", add))
    assert LATER in said and where in said and "made after the first step" in said, said


def test_what_is_made_again_in_each_step_is_not_named(jobs: Runner) -> None:
    """The restarted script has its own."""
    body = "held[:] = [counter(step)]; box['a'] = counter(step)"
    said = jobs.same(SCRIPT.replace("if step == 4:", "if True:").replace("ADD", body))
    assert "not restorable" not in said, said
