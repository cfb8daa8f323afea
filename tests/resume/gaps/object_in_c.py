# state: objects of packages that are written in C and do not expose their state (attributes of a scripted module)
# result: keep the state of the restarted script
# reported: by a verified resume
import torch
from torch import nn
from toy import begin, end, parts, say, train


class Counter(nn.Module):
    def __init__(self):
        super().__init__()
        self.calls: int = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x * self.calls


rank = begin()
model, optimizer = parts()
counter = torch.jit.script(Counter())
for step in range(12):
    loss = train(model, optimizer, counter(torch.randn(8, 4)))
    say(rank, step, loss.hex(), counter.calls)
end(rank, model, optimizer)
