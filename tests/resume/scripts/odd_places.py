# ranks: 2; kills: 2 6 9
# State under odd names and in odd places: names with two underscores, globals that a string names,
# attributes of enum members and of modules of others, of torch's modules, of parameter groups;
# attributes that are deleted.
import collections
import enum

import torch
import torch.distributed as dist
from digest import digest
from torch import nn

__losses__ = []
table = {}


class Phase(enum.Enum):
    WARM = 1
    MAIN = 2


class Meter:
    __total__ = 0.0


class Schedule:
    def __init__(self):
        self.steps = 0


class Descent(torch.optim.Optimizer):
    """Steps the parameters that are not frozen."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.requires_grad:
                    p.sub_(group["lr"] / (1 + group["schedule"].steps) * p.grad)


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerDecoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
        self.register_buffer("memory", torch.randn(1, 2, 4))

    def forward(self, x):
        return self.layer(x[None], self.memory)


def main():
    dist.init_process_group("reft")
    rank = dist.get_rank()
    torch.manual_seed(3)
    model = nn.parallel.DistributedDataParallel(Decoder())
    layer, lstm = model.module.layer, nn.LSTM(2, 2)
    bias = nn.Parameter(torch.zeros(4))
    schedule = Schedule()
    optimizer = Descent([{"params": list(model.parameters())}, {"params": [bias]}])
    for group in optimizer.param_groups:
        group["schedule"] = schedule
    bias.warming = True
    lstm.data = []
    collections.steps = 0
    Phase.MAIN.steps = 0
    seen = {}.items()
    for step in range(12):
        optimizer.zero_grad()
        loss = (model(torch.randn(8, 4)) + bias).square().mean()
        loss.backward()
        optimizer.step()
        value = loss.item()
        if step == 3:
            layer.activation = nn.functional.gelu
            del bias.warming
        if step == 5:
            bias.requires_grad_(False)
            seen = {"at": step}.items()
        schedule.steps += 1
        lstm.data.append(step)
        collections.steps += 1
        Phase.MAIN.steps += 1
        __losses__.append(value)
        Meter.__total__ += value
        globals()["table"][step] = value
        shared = optimizer.param_groups[1]["schedule"].steps
        counts = (len(__losses__), len(table), len(lstm.data), collections.steps, Phase.MAIN.steps, shared)
        rest = (Meter.__total__.hex(), hasattr(bias, "warming"), bias.requires_grad, list(seen))
        print(f"r{rank} {step} {value.hex()} {counts} {rest}", flush=True)
    print(f"r{rank} final {digest(model, bias)}", flush=True)
    dist.destroy_process_group()


main()
