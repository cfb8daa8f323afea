# ranks: 2; kills: 2 5 8
# Truncated back-propagation: an LSTM's hidden state is carried from step to step, and a memory
# tensor is a loop variable.
import torch
import torch.distributed as dist
from digest import digest
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn, self.out = nn.LSTM(2, 5, batch_first=True), nn.Linear(5, 2)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x, hidden):
        self.calls += 1
        y, hidden = self.rnn(x, hidden)
        return self.out(y), hidden


dist.init_process_group("reft")
rank = dist.get_rank()
torch.manual_seed(66)
model = DDP(Net())
optimizer = torch.optim.Rprop(model.parameters(), lr=0.01)
series = torch.sin(torch.arange(240.0) / 7).reshape(2, 60, 2)
hidden = None
memory = torch.zeros(3)
for chunk in range(0, 50, 5):
    x, y = series[:, chunk : chunk + 5] + rank, series[:, chunk + 1 : chunk + 6] + rank
    if hidden is not None:
        hidden = tuple(h.detach() for h in hidden)
    predicted, hidden = model(x, hidden)
    loss = (predicted - y).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    memory = 0.5 * memory + loss.detach() * torch.arange(3.0)
    print(f"r{rank} {chunk} loss {loss.item().hex()} ids {chunk} {memory.tolist()}", flush=True)
print(f"r{rank} final {memory.tolist()} {digest(model, optimizer, list(hidden))}", flush=True)
dist.destroy_process_group()
