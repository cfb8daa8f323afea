"""A small training script whose last rank fails, or stops itself, once a file is there.

    hardware_worker.py --backend reft --out DIR --go FILE --then raise|stop
"""

from __future__ import annotations

import argparse
import os
import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", default="reft")
    parser.add_argument("--out", required=True)
    parser.add_argument("--go", type=Path, required=True)
    parser.add_argument("--then", choices=["raise", "stop"], required=True)
    args = parser.parse_args()
    dist.init_process_group(args.backend)
    model = DistributedDataParallel(torch.nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    while True:
        optimizer.zero_grad()
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        if args.go.exists() and dist.get_rank() == dist.get_world_size() - 1:
            if args.then == "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            raise RuntimeError("CUDA error: unspecified launch failure")
        time.sleep(0.01)  # a step of a model that is not as small


if __name__ == "__main__":
    main()
