# ranks: 1; kills: 2 6 10
# Lists of Python values as data: random.sample, sorted, dict iterators, a set that grows, nested
# tuples unpacked in the loop.
import random

import torch
import torch.distributed as dist
from digest import digest
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def main():
    dist.init_process_group("reft")
    random.seed(3)
    torch.manual_seed(3)
    model = DDP(nn.Linear(1, 1))
    optimizer = torch.optim.ASGD(model.parameters(), lr=0.05)
    examples = [(f"doc{i}", (i / 7, (i * i % 5) / 5)) for i in range(12)]
    vocabulary, lengths, weights = set(), {}, [1.0, 0.5, 0.25]
    for epoch, weight in enumerate(weights):
        random.shuffle(examples)
        for (a, (x1, y1)), (b, (x2, y2)), (c, (x3, y3)) in zip(
            examples[::3], examples[1::3], examples[2::3], strict=False
        ):
            x, y = torch.tensor([[x1], [x2], [x3]]), torch.tensor([[y1], [y2], [y3]])
            loss = weight * (model(x) - y).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            vocabulary |= {a, b, c}
            lengths[a] = lengths.get(a, 0) + 1
            print(f"r0 {epoch} loss {loss.item().hex()} ids {[a, b, c]} {len(vocabulary)}", flush=True)
    print(
        f"r0 final {sorted(vocabulary)} {sorted(lengths.items())} {examples[0]} {digest(model, optimizer)}", flush=True
    )
    dist.destroy_process_group()


main()
