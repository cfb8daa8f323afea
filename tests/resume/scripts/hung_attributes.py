# ranks: 2; kills: 5 9 13
# State that a script hangs on what is not its own: the optimizer, the wrapped model, a stock
# module, parameters, the loader; and in objects of libraries: an event, a seed sequence, a masked
# array, a distribution.
import threading
from collections import deque

import numpy as np
import torch
import torch.distributed as dist
from digest import digest
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Welford:
    def __init__(self):
        self.n, self.mean = 0, 0.0

    def add(self, value):
        self.n += 1
        self.mean += (value - self.mean) / self.n


class Scaler(torch.amp.GradScaler):
    def __init__(self):
        super().__init__("cpu", init_scale=4.0)
        self.calls = 0

    def count(self):
        self.calls += 1


class Bank(nn.Module):
    def __init__(self, rows, width):
        super().__init__()
        self.register_buffer("memory", torch.zeros(rows, width))

    def update(self, rows, values):
        self.memory.data[rows] = 0.5 * self.memory.data[rows] + 0.5 * values


class CountingLoader(DataLoader):
    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.epoch = 0

    def __iter__(self):
        self.sampler.set_epoch(self.epoch)
        self.epoch += 1
        yield from super().__iter__()


def count_dead(module, inputs, output):
    module.calls += 1
    module.dead = module.dead + (output <= 0).sum().item()


def main():
    dist.init_process_group("reft")
    rank = dist.get_rank()
    torch.manual_seed(3)
    data = TensorDataset(torch.arange(24), torch.randn(24, 4))
    loader = CountingLoader(data, 4, sampler=DistributedSampler(data))
    net = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))
    net[1].calls = net[1].dead = 0
    net[1].register_forward_hook(count_dead)
    model = nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    optimizer.updates, optimizer.history, model.global_step, loader.batches = 0, [], 0, 0
    for p in net.parameters():
        p._average, p.stats, p.recent = p.detach().clone(), Welford(), deque(maxlen=3)
    scaler, bank, stop, seeds = Scaler(), Bank(25, 2), threading.Event(), np.random.SeedSequence(5)
    table = np.ma.masked_all(24)
    policy = torch.distributions.Normal(torch.zeros(2), torch.ones(2))
    for _ in range(6):
        for ids, x in loader:
            out = model(x)
            loss = out.square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            value = loss.item()
            optimizer.updates += 1
            optimizer.history.append(value)
            model.global_step += 1
            loader.batches += 1
            for p in net.parameters():
                p._average.lerp_(p.detach(), 0.1)
                p.stats.add(p.detach().sum().item())
                p.recent.append(p.detach().mean().item())
            scaler.count()
            bank.update(ids, out.detach())
            policy.loc.add_(out.detach().mean(0))
            table[ids.numpy()] = value
            noise = np.random.default_rng(seeds.spawn(1)[0]).random()
            if model.global_step == 4:
                stop.set()
            hung = (
                optimizer.updates,
                len(optimizer.history),
                model.global_step,
                loader.batches,
                loader.epoch,
                scaler.calls,
            )
            own = [(p.stats.n, p.stats.mean.hex(), sum(p.recent).hex()) for p in net.parameters()]
            kept = digest([p._average for p in net.parameters()], bank, policy.loc)
            print(
                f"r{rank} {value.hex()} {ids.tolist()} {hung} {own} {kept} {net[1].calls} {net[1].dead} {stop.is_set()}"
                f" {type(table).__name__} {table.count()} {table.mean().item().hex()} {noise.hex()}",
                flush=True,
            )
    print(f"r{rank} final {digest(model, optimizer)}", flush=True)
    dist.destroy_process_group()


main()
