# state: classes that the script registers with an `abc.ABC` in mid-run
# result: are not registered
# reported: by a verified resume
import abc

import torch
from toy import begin, end, parts, say, train


class Frozen(abc.ABC):  # noqa: B024
    pass


class Item:
    pass


if __name__ == "__main__":
    rank = begin()
    model, optimizer = parts()
    item = Item()
    for step in range(12):
        loss = train(model, optimizer, torch.randn(8, 4) * (0.5 if isinstance(item, Frozen) else 1.0))
        if step == 2:
            Frozen.register(Item)
        say(rank, step, loss.hex())
    end(rank, model, optimizer)
