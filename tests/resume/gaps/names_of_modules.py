# state: attributes of modules of others whose names no code mentions as attributes, or in `setattr(module, "name", …)` (`vars(sys).update(scale=1)`); of `builtins`, they come back
# result: start again
# reported: by a verified resume
import sys

import torch
from toy import begin, end, parts, say, train

vars(sys).update({f"calls_of_{name}": [] for name in ("loss", "gap")})
rank = begin()
model, optimizer = parts()
for step in range(12):
    sys.calls_of_gap.append(step)
    loss = train(model, optimizer, torch.randn(8, 4) * (1 + 0.1 * len(sys.calls_of_gap)))
    say(rank, step, loss.hex())
end(rank, model, optimizer)
