"""Training in one thread after the other, or in step with the main thread's own loop: the main
thread's place was lost without a word, and the resume called bit-identical."""

from __future__ import annotations

from tests.support.killed import Runner

MODEL = """
import threading
model = torch.nn.Linear(4, 2)
opt = torch.optim.SGD(model.parameters(), lr=0.05)
seen = [0]

def train(x):
    opt.zero_grad()
    model(x).square().mean().backward()
    opt.step()
    seen[0] += 1
"""
ONE_AFTER_THE_OTHER = MODEL + """
def work(k):
    for i in range(3):
        train(torch.full((3, 4), k + i * 0.1))

for k in range(4):
    thread = threading.Thread(target=work, args=(k,))
    thread.start()
    thread.join()
final(*model.parameters(), seen=seen)
"""
IN_STEP = MODEL + """
ready, done, box = threading.Semaphore(0), threading.Semaphore(0), {}

def work():
    for _ in range(12):
        ready.acquire()
        train(box["x"])
        done.release()

def main():
    thread = threading.Thread(target=work)
    thread.start()
    x = torch.ones(3, 4)
    for i in range(12):
        x = x * 0.9 + i * 0.01
        box["x"] = x
        ready.release()
        done.acquire()
    thread.join()

main()
final(*model.parameters(), seen=seen)
"""
WAITS = MODEL + """
import time

step = 0

def work():
    global step
    for step in range(12):
        train(torch.full((3, 4), step * 0.1))

thread = threading.Thread(target=work)
thread.start()
while thread.is_alive():
    thread.join(0.01)
final(*model.parameters(), seen=seen, step=step)
"""
PLACE = "not restorable from step {}: loop (place in the loop): {}"


def test_one_thread_after_the_other_is_named(jobs: Runner) -> None:
    said = jobs.run(ONE_AFTER_THE_OTHER)
    why = "training runs in another thread than in the first iteration"
    assert PLACE.format("4 on", why) in said, said


def test_a_main_thread_that_goes_on_is_named(jobs: Runner) -> None:
    said = jobs.run(IN_STEP)
    assert "the main thread goes on while another thread trains (main:" in said, said


def test_a_main_thread_that_waits_is_no_hindrance(jobs: Runner) -> None:
    said = jobs.same(WAITS)
    assert "not restorable" not in said, said
