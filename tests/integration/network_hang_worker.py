"""Started by torchrun: a training over gloo that writes its rank's newest step to OUT/<rank>.step."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

STEP_SEC = 0.05


def main() -> None:
    out = Path(sys.argv[1])
    dist.init_process_group(backend="reft")
    rank = dist.get_rank()
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    step = 0
    while True:
        optimizer.zero_grad()
        model(torch.ones(4, 64)).square().mean().backward()
        dist.all_reduce(model.weight.grad)
        optimizer.step()
        (out / f"{rank}.step").write_text(str(step))
        step += 1
        time.sleep(STEP_SEC)


if __name__ == "__main__":
    main()
