# state: how often `__hash__` of keys has been called, where a class counts it
# result: more often: a resume fills sets and dicts again
# reported: no
import torch
from toy import begin, end, parts, say, train


class Key:
    calls = 0

    def __hash__(self) -> int:
        Key.calls += 1
        return 5


if __name__ == "__main__":
    rank = begin()
    model, optimizer = parts()
    visits = {Key(): 0}
    for step in range(12):
        loss = train(model, optimizer, torch.randn(8, 4))
        for key in visits:
            visits[key] += 1
        say(rank, step, loss.hex(), Key.calls)
    end(rank, model, optimizer)
