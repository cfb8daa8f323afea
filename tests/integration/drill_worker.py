"""Trains a small model for longer than any test waits.

Its argument plants what a resume cannot restore, or what no run computes twice:

- nothing: all of its state is restored
- hash: a running hash chooses the batch
- noise: the operating system's random numbers are the batch
- changed: a restarted process builds a wider model
- crash: a restarted process fails
- short: it ends after two steps
- gloo: it does not use reft
"""

from __future__ import annotations

import hashlib
import os
import random
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def main(plant: str) -> None:
    dist.init_process_group(backend="gloo" if plant == "gloo" else "reft")
    is_restarted = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    if plant == "crash" and is_restarted:
        raise RuntimeError("the output folder exists")
    width = 9 if plant == "changed" and is_restarted else 8
    random.seed(1)
    torch.manual_seed(1)
    model = DistributedDataParallel(
        torch.nn.Sequential(
            torch.nn.Linear(8, width), torch.nn.Dropout(0.2), torch.nn.Linear(width, 1)
        )
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loader = torch.utils.data.DataLoader(torch.randn(32, 8), batch_size=4, shuffle=True)
    seen = hashlib.sha256()
    total, step = 0.0, 0
    for _epoch in range(1000):
        for batch in loader:
            if plant == "hash":
                batch = batch * (1 + seen.digest()[0])
                seen.update(b"1")
            elif plant == "noise":
                batch = batch + int.from_bytes(os.urandom(2), "little")
            loss = model(batch).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item() + random.random()
            step += 1
            if plant == "short" and step == 2:
                return


if __name__ == "__main__":
    main(sys.argv[1])
