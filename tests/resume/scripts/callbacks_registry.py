# ranks: 1; kills: 2 5 8
# A framework in small: callbacks with state, an event bus, closures that count, a deque of recent
# losses, defaultdicts.
import collections

import torch
import torch.distributed as dist
from digest import digest
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Recent:
    def __init__(self, size):
        self.values = collections.deque(maxlen=size)
        self.by_parity = collections.defaultdict(list)

    def on_step(self, step, loss):
        self.values.append(loss)
        self.by_parity[step % 2].append(loss)


def counter():
    count = 0

    def on_step(step, loss):
        nonlocal count
        count += 1
        return count

    return on_step


class Loop:
    def __init__(self, model, optimizer, callbacks):
        self.model, self.optimizer, self.callbacks = model, optimizer, callbacks
        self.step = 0

    def run(self, source):
        for ids, x in source:
            loss = self.update(x)
            for callback in self.callbacks:
                callback(self.step, loss)
            print(f"r0 {self.step} loss {loss.hex()} ids {ids}", flush=True)

    def update(self, x):
        loss = self.model(x).abs().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.step += 1
        return loss.item()


def main():
    dist.init_process_group("reft")
    torch.manual_seed(27)
    model = DDP(nn.Linear(2, 2))
    recent, count = Recent(4), counter()
    loop = Loop(model, torch.optim.Adadelta(model.parameters(), lr=0.5), [recent.on_step, count])
    table = {name: torch.randn(3, 2) for name in "abcdefghi"}
    loop.run(table.items())
    print(f"r0 final {[v.hex() for v in recent.values]} {dict(recent.by_parity)} {count(0, 0)}", flush=True)
    print(f"r0 final {loop.step} {digest(model, loop.optimizer)}", flush=True)
    dist.destroy_process_group()


main()
