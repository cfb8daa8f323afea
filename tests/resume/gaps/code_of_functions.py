# state: what a function or class of yours is made of, if the script changes that in mid-run (`function.__code__ = …`, `Class.__bases__ = …`)
# result: start again
# reported: by a verified resume
import torch
from toy import begin, end, parts, say, train


def scale() -> float:
    return 1.0


def doubled() -> float:
    return 2.0


class One:
    shift = 0.0


class Other:
    shift = 0.5


class Shifted(One):
    pass


rank = begin()
model, optimizer = parts()
for step in range(12):
    loss = train(model, optimizer, torch.randn(8, 4) * scale() + Shifted.shift)
    if step == 2:
        scale.__code__ = doubled.__code__
        Shifted.__bases__ = (Other,)
    say(rank, step, loss.hex())
end(rank, model, optimizer)
