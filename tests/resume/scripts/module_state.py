# ranks: 2; kills: 2 5 9
# State outside of the loop's frames: another module, classes, functions, default arguments, a file
# that is read line by line.
import io

import tallies
import torch
import torch.distributed as dist
from digest import digest
from tallies import Registry, note, smooth
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Trainer:
    steps = 0
    lines = io.StringIO()

    def __init__(self, model, source):
        self.model, self.source = model, source
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        self.registry = Registry()

    def step(self):
        line = self.source.readline()
        x = torch.tensor([len(line) / 50, line.count("e") / 5, line.count(" ") / 9])
        loss = (self.model(x) - x.sum()).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        Trainer.steps += 1
        Trainer.lines.write(line.strip() + ";")
        return loss.item()


def main():
    dist.init_process_group("reft")
    rank = dist.get_rank()
    torch.manual_seed(8)
    with open(__file__) as source:
        run(rank, Trainer(DDP(nn.Linear(3, 1)), source))
    dist.destroy_process_group()


def run(rank, trainer):
    while Trainer.steps < 11:
        loss = trainer.step()
        note(loss)
        tallies.Registry.add(f"s{Trainer.steps % 4}")
        told = (
            f"{smooth(loss).hex()} {trainer.registry.describe(tallies.updates)} {note.last.hex()} {tallies.best.hex()}"
        )
        print(f"r{rank} {Trainer.steps} loss {loss.hex()} {told} {Registry.made} {Registry.names}", flush=True)
    print(
        f"r{rank} final {[loss.hex() for loss in tallies.history]} {Trainer.lines.getvalue()} {Registry.late}",
        flush=True,
    )
    print(f"r{rank} final {digest(trainer.model, trainer.optimizer)}", flush=True)


main()
