# state: functions of the script in child processes that answer over descriptors (`os.pipe`, files)
# result: start again
# reported: by a verified resume
import os

import torch
from toy import begin, end, parts, say, train


def environment(questions, answers):
    total = 0.0
    while text := os.read(questions, 100):
        total = total * 0.5 + float(text)
        os.write(answers, str(total).encode())


if __name__ == "__main__":
    questions, ask = os.pipe()
    told, answers = os.pipe()
    if os.fork() == 0:
        os.close(ask)
        environment(questions, answers)
        os._exit(0)
    rank = begin()
    model, optimizer = parts()
    seen = 0.0
    for step in range(12):
        os.write(ask, str(seen * 0.1 + 1.0).encode())
        seen = float(os.read(told, 100))
        loss = train(model, optimizer, seen * torch.randn(8, 4))
        say(rank, step, loss.hex(), seen)
    end(rank, model, optimizer)
