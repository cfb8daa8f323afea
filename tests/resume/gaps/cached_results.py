# state: `functools.lru_cache`
# result: results that were cached after the first step are computed again
# reported: by a verified resume
import functools

import torch
from toy import begin, end, parts, say, train


@functools.lru_cache
def offset(key):
    return torch.rand(4)


rank = begin()
model, optimizer = parts()
for step in range(12):
    loss = train(model, optimizer, torch.randn(8, 4) + offset(step % 4))
    say(rank, step, loss.hex(), offset(step % 4).tolist())
end(rank, model, optimizer)
