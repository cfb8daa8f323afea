"""A small training script whose last rank fails in a function of a C library after its third step.

    native_fault_worker.py --backend reft --out DIR --library FILE --how 0|1 --thread main|other

`how`: as `fail_in_c(how)` of the library takes it.
"""

from __future__ import annotations

import argparse
import ctypes
import threading

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", default="reft")
    parser.add_argument("--out", required=True)
    parser.add_argument("--library", required=True)
    parser.add_argument("--how", type=int, required=True)
    parser.add_argument("--thread", choices=["main", "other"], required=True)
    args = parser.parse_args()
    library = ctypes.CDLL(args.library)
    dist.init_process_group(args.backend)
    model = DistributedDataParallel(torch.nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(1, 100):
        optimizer.zero_grad()
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        if step == 3 and dist.get_rank() == dist.get_world_size() - 1:
            if args.thread == "main":
                library.fail_in_c(args.how)
            thread = threading.Thread(target=library.fail_in_c, args=(args.how,))
            thread.start()
            thread.join()


if __name__ == "__main__":
    main()
