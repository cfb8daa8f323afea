# state: `id(…)` of objects that were made after the first step, as keys of a dict
# result: stay those of the killed process
# reported: by a verified resume
import torch
from toy import begin, end, parts, say, train


class Item:
    pass


if __name__ == "__main__":
    rank = begin()
    model, optimizer = parts()
    items, visits = [], {}
    for step in range(12):
        loss = train(model, optimizer, torch.randn(8, 4))
        if step % 3 == 1:
            items.append(Item())
        for item in items:
            visits[id(item)] = visits.get(id(item), 0) + 1
        say(rank, step, loss.hex(), len(visits))
    end(rank, model, optimizer)
