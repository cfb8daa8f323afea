"""Objects that lead to other processes came back as they were at first, and the resume was called
bit-identical."""

from __future__ import annotations

import pytest

from tests.support.killed import Runner

SCRIPT = """
import multiprocessing, subprocess, sys
from multiprocessing.shared_memory import ShareableList

SIMULATOR = "import sys\\ns = 0\\nfor l in sys.stdin:\\n s = s * 0.9 + float(l)\\n print(s, flush=True)"

class Simulator:
    def __init__(self):
        pipe = subprocess.PIPE
        self.child = subprocess.Popen([sys.executable, "-c", SIMULATOR], stdin=pipe, stdout=pipe, text=True, bufsize=1)
    def append(self, value):
        self.child.stdin.write(f"{value}\\n")
        self.child.stdin.flush()
        answers.append(float(self.child.stdout.readline()))
    def end(self):
        self.child.stdin.close()
        self.child.wait()

class Shared:
    def __init__(self):
        self.cells = ShareableList([0.0])
    def append(self, value):
        self.cells[0] += value
        answers.append(self.cells[0])
    def end(self):
        self.cells.shm.close()
        self.cells.shm.unlink()

class Managed:
    def __init__(self):
        self.manager = multiprocessing.Manager()
        self.items = self.manager.list()
    def append(self, value):
        self.items.append(value)
        answers.append(sum(self.items))
    def end(self):
        self.manager.shutdown()

if __name__ == "__main__":
    answers = []
    kept = KIND()
    model = torch.nn.Linear(4, 2)
    opt = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(12):
        opt.zero_grad()
        model(torch.randn(3, 4)).square().mean().backward()
        opt.step()
        kept.append(float(step))
    kept.end()
    final(*model.parameters(), answers=answers)
"""


@pytest.mark.parametrize(
    ("kind", "named"),
    [
        ("Simulator", "<module>:kept.child (subprocess.Popen): the state of a process that it runs is not restored"),
        ("Shared", "<module>:kept.cells (multiprocessing.shared_memory.ShareableList): memory that processes share"),
        ("Managed", "<module>:kept.items (multiprocessing.managers.ListProxy): what the manager's process keeps"),
    ],
)
def test_they_are_named_before_the_kill(jobs: Runner, kind: str, named: str) -> None:
    said = jobs.run(SCRIPT.replace("KIND", kind), 1, "0:8:before_seal", REFT_RESUME_VERIFY="always")
    assert named in said[: said.index("resuming at")], said[-3000:]
    assert "bit-identical\n" not in said, said[-3000:]
    assert "bit-identical but for " in said or "DIFFERS" in said, said[-3000:]


# A child process that no variable holds answers over a file.
UNSEEN = """
import os
os.mkfifo(ask := f"{os.environ['REFT_RUN_DIR']}-{attempt}-ask")
os.mkfifo(tell := f"{os.environ['REFT_RUN_DIR']}-{attempt}-tell")
if os.fork() == 0:
    total = 0.0
    with open(ask) as questions, open(tell, "w") as answers:
        for line in questions:
            total = total * 0.9 + float(line)
            print(total, file=answers, flush=True)
    os._exit(0)
asking, told = os.open(ask, os.O_WRONLY), os.open(tell, os.O_RDONLY)
model = torch.nn.Linear(4, 2)
opt = torch.optim.SGD(model.parameters(), lr=0.05)
answer = 0.0
for step in range(12):
    opt.zero_grad()
    model(torch.randn(3, 4)).square().mean().backward()
    opt.step()
    os.write(asking, f"{step}\\n".encode())
    answer = float(os.read(told, 100))
os.close(asking)
final(*model.parameters(), answer=answer)
"""


def test_a_number_that_differs_in_each_computation_is_named(jobs: Runner) -> None:
    said = jobs.run(UNSEEN, 1, "0:8:before_seal", REFT_RESUME_VERIFY="always")
    assert "bit-identical but for __main__:answer on rank 0" in said, said[-3000:]
