"""Objects of torch, the standard library and NumPy went back to the restarted script's, in silence:
Sobol engines, parsers, shared numbers, context variables, bit generators, large lists shuffled in
place."""

from __future__ import annotations

from tests.support.killed import Runner, finals

SCRIPT = """
import configparser, contextvars, hashlib, multiprocessing, random, threading
import numpy
from torch.quasirandom import SobolEngine

LEVEL = contextvars.ContextVar("level", default=0)
HERE = threading.local()

class Points(torch.utils.data.Sampler):
    def __init__(self, n):
        self.n, self.engine = n, SobolEngine(1, scramble=True, seed=3)

    def __iter__(self):
        return iter((self.engine.draw(self.n)[:, 0] * self.n).long().tolist())

    def __len__(self):
        return self.n

class Data(torch.utils.data.Dataset):
    def __init__(self):
        self.order, self.weights = list(range(1000)), {i: 1.0 for i in range(900)}

    def __len__(self):
        return 12

    def __getitem__(self, i):
        return torch.tensor([float(self.order[i]), self.weights[i]])

class Run:
    def __init__(self):
        self.settings = configparser.ConfigParser()
        self.settings["a"] = {"n": "0"}
        self.shared = multiprocessing.Value("i", 0)
        self.bits = numpy.random.PCG64(4)
        self.points = SobolEngine(2, scramble=True, seed=17)
        RUNNING = 0

def main():
    data, run, shuffle, HERE.n = Data(), Run(), random.Random(4), 0
    loader = torch.utils.data.DataLoader(data, batch_size=3, sampler=Points(12))
    model = torch.nn.Linear(2, 1)
    opt = torch.optim.SGD(model.parameters(), 1e-6)
    found = []
    for epoch in range(3):
        for x in loader:
            loss = model(x + run.points.draw(3)).square().mean()
            opt.zero_grad()
            loss.backward()
            opt.step()
            run.settings["a"]["n"] += "1"
            run.shared.value += 1
            LEVEL.set(LEVEL.get() + 1)
            HERE.n += 1
            data.weights[shuffle.randrange(12)] += 0.5
            STEP
            found.append((float(x.sum()), int(run.bits.random_raw()) % 1000))
        shuffle.shuffle(data.order)
    final(*model.state_dict().values(), n=run.settings["a"]["n"], shared=run.shared.value,
          level=LEVEL.get(), here=HERE.n, found=found, END)
main()
"""
QUIET = SCRIPT.replace("STEP", "pass").replace(", END", "")


def test_they_come_back(jobs: Runner) -> None:
    said = jobs.same(QUIET, kill="0:7:before_seal")
    assert "not restor" not in said, said


def test_a_running_hash_is_named_before_the_kill(jobs: Runner) -> None:
    script = SCRIPT.replace("RUNNING = 0", "self.hash = hashlib.sha256()")
    script = script.replace("STEP", "run.hash.update(b'x')")
    said = jobs.run(script.replace("END", "hash=run.hash.hexdigest()"), ranks=1)
    assert "not restorable from step 2 on: main:run.hash (_hashlib.HASH): has changed" in said
    assert len(finals(said)) == 1
