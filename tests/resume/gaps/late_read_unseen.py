# state: gradients that code reads after the optimizer step which reft does not find there: it follows names, attributes and lists to the script's functions, not the items of dicts, `super()` or strings
# result: keep the values of the discarded iteration until the next backward pass
# reported: no
import torch
from toy import begin, end, parts, say, train


def norm_of(model):
    return sum(p.grad.square().sum() for p in model.parameters()).sqrt().item()


rank = begin()
model, optimizer = parts()
logged = {"norm": norm_of}
for step in range(12):
    loss = train(model, optimizer, torch.randn(8, 4))
    say(rank, step, loss.hex(), logged["norm"](model).hex())
end(rank, model, optimizer)
