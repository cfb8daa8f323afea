# ranks: 2; kills: 3 7 10
# A trainer with its counters in `self`, meters, a history, and a state held in a dataclass.
import dataclasses
import os

import torch
import torch.distributed as dist
from digest import digest
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Squares(Dataset):
    def __init__(self, n):
        self.x = torch.linspace(-1, 1, n).unsqueeze(1)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return i, self.x[i], self.x[i] ** 2


class Meter:
    def __init__(self):
        self.sum, self.count = 0.0, 0

    def update(self, value, n=1):
        self.sum += value * n
        self.count += n


@dataclasses.dataclass
class Progress:
    epoch: int = 0
    samples: int = 0
    best: float = float("inf")
    history: list = dataclasses.field(default_factory=list)


class Trainer:
    def __init__(self):
        self.rank = int(os.environ["RANK"])
        self.model = DistributedDataParallel(nn.Sequential(nn.Linear(1, 12), nn.Tanh(), nn.Linear(12, 1)))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.02)
        dataset = Squares(24)
        self.sampler = DistributedSampler(dataset)
        self.loader = DataLoader(dataset, batch_size=3, sampler=self.sampler, drop_last=True)
        self.progress = Progress()
        self.meter = Meter()
        self.global_step = 0

    def train_step(self, ids, x, y):
        self.optimizer.zero_grad()
        loss = (self.model(x) - y).abs().mean()
        loss.backward()
        self.optimizer.step()
        self.global_step += 1
        self.meter.update(loss.item(), len(ids))
        self.progress.samples += len(ids)
        return loss

    def run_epoch(self):
        self.sampler.set_epoch(self.progress.epoch)
        for ids, x, y in self.loader:
            loss = self.train_step(ids, x, y)
            print(
                f"r{self.rank} {self.progress.epoch} {self.global_step} {loss.item().hex()} {ids.tolist()}", flush=True
            )

    def fit(self, epochs):
        while self.progress.epoch < epochs:
            self.meter = Meter()
            self.run_epoch()
            average = self.meter.sum / self.meter.count
            self.progress.best = min(self.progress.best, average)
            self.progress.history.append(average)
            self.progress.epoch += 1
        print(f"r{self.rank} final {self.progress} {self.global_step} {vars(self.meter)}", flush=True)
        print(f"r{self.rank} final {digest(self.model, self.optimizer)}", flush=True)


if __name__ == "__main__":
    dist.init_process_group("reft")
    torch.manual_seed(0)
    Trainer().fit(3)
    dist.destroy_process_group()
