# ranks: 1; kills: 2 5 9
# A loop that skips bad batches by `continue` in an except, with try/finally and a with statement
# around the step.
import contextlib

import torch
import torch.distributed as dist
from digest import digest
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Bad(ValueError):
    pass


def load(i):
    if i % 4 == 3:
        raise Bad(f"item {i}")
    return torch.full((2, 3), float(i)).sin()


@contextlib.contextmanager
def counted(counts, name):
    counts[name] = counts.get(name, 0) + 1
    yield
    counts[name + " done"] = counts.get(name + " done", 0) + 1


def main():
    dist.init_process_group("reft")
    torch.manual_seed(15)
    model = DDP(nn.Linear(3, 3))
    optimizer = torch.optim.Adamax(model.parameters(), lr=0.02)
    counts, skipped = {}, []
    try:
        for i in range(14):
            try:
                x = load(i)
            except Bad as error:
                skipped.append(str(error))
                continue
            with counted(counts, "step"), torch.autograd.set_grad_enabled(True):
                loss = (model(x) - 1).square().mean()
                optimizer.zero_grad()
                loss.backward()
                try:
                    optimizer.step()
                finally:
                    counts["steps"] = counts.get("steps", 0) + 1
            print(f"r0 {i} loss {loss.item().hex()} ids {i} {counts} {skipped}", flush=True)
    finally:
        print(f"r0 leaving the loop after {counts}", flush=True)
    print(f"r0 final {counts} {skipped} {digest(model, optimizer)}", flush=True)
    dist.destroy_process_group()


main()
