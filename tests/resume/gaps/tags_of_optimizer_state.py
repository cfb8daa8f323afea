# state: attributes that your code sets on tensors of an optimizer's state (`optimizer.state[p]["exp_avg"].age = 1`); those of parameters, and of tensors among the settings of a group, come back
# result: lost
# reported: by a verified resume
import torch
from toy import begin, end, parts, say, train

rank = begin()
model, optimizer = parts()
for step in range(12):
    state = next(iter(optimizer.state.values()), {})
    kept = next((one for one in state.values() if isinstance(one, torch.Tensor) and one.dim()), None)
    age = getattr(kept, "age", 0) + 1
    if kept is not None:
        kept.age = age
    loss = train(model, optimizer, torch.randn(8, 4) * (1 + 0.1 * age))
    say(rank, step, loss.hex())
end(rank, model, optimizer)
