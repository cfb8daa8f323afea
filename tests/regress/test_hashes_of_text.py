"""`hash()` of text has another seed in each process: a script that chose rows by it trained other rows
after a restart, and the resume was called bit-identical."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.support.killed import Runner

SCRIPT = """
table = torch.nn.Embedding(64, 4)
optimizer = torch.optim.SGD(table.parameters(), lr=0.1, momentum=0.9)
for step in range(12):
    rows = torch.tensor([hash(word) % 64 for word in ("ab", "cd", "ef")])
    loss = table(rows).square().sum() * torch.rand(())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
final(*table.parameters())
"""
NAMED = "not restorable: hash() (builtin_function_or_method): its results for text and bytes are others"


def test_they_are_named_before_the_kill(jobs: Runner) -> None:
    said = jobs.run(SCRIPT, 1, "0:8:before_seal", REFT_RESUME_VERIFY="always")
    assert NAMED in said[: said.index("resuming at")], said[-3000:]
    assert "and is bit-identical\n" not in said, said[-3000:]


@pytest.mark.parametrize(("seed", "differ"), [(None, True), ("random", True), ("0", False), ("7", False)])
def test_a_seed_that_is_set_makes_them_the_same(seed: str | None, differ: bool) -> None:
    env = {name: value for name, value in os.environ.items() if name != "PYTHONHASHSEED"}
    env |= {} if seed is None else {"PYTHONHASHSEED": seed}
    ask = "from reft._continuation.statics import HASHES_DIFFER; print(HASHES_DIFFER)"
    said = subprocess.run([sys.executable, "-c", ask], env=env, capture_output=True, text=True, check=True)
    assert said.stdout.strip() == str(differ)
