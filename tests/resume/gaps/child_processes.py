# state: functions of the script in child processes that answer over a pipe (environments)
# result: start again
# reported: by a verified resume
import multiprocessing

import torch
from toy import begin, end, parts, say, train


def environment(pipe):
    total = 0.0
    while (action := pipe.recv()) is not None:
        total = total * 0.5 + action
        pipe.send(total)


if __name__ == "__main__":
    pipe, other = multiprocessing.Pipe()
    context = multiprocessing.get_context("fork")
    context.Process(target=environment, args=(other,), daemon=True).start()
    rank = begin()
    model, optimizer = parts()
    seen = 0.0
    for step in range(12):
        pipe.send(seen * 0.1 + 1.0)
        seen = pipe.recv()
        loss = train(model, optimizer, seen * torch.randn(8, 4))
        say(rank, step, loss.hex(), seen)
    pipe.send(None)
    end(rank, model, optimizer)
