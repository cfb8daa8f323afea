"""Started by torchrun on several nodes: trains a replica on a CUDA device, real or stand-in, without
random numbers, so that a rank whose vault is lost can end with the same bits.

    cuda_nodes_worker.py --steps N --out DIR

Each rank writes DIR/r<rank>.log, a line a step, and DIR/r<rank>.final, a hash of parameters and
optimizer state. The layers have sizes that leave every alignment; AdamW keeps its counts on the host.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    device = torch.device("cuda", torch.cuda.current_device())
    dist.init_process_group("reft")
    rank = dist.get_rank()
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(33, 301), nn.GELU(), nn.Linear(301, 67), nn.GELU(), nn.Linear(67, 3)).to(device)
    model = DistributedDataParallel(net, device_ids=[device.index])
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    log = (args.out / f"r{rank}.log").open("a", buffering=1)
    for step in range(1, args.steps + 1):
        optimizer.zero_grad()
        inputs = torch.sin(torch.arange(8 * 33.0) * (step + rank)).view(8, 33)
        loss = model(inputs.to(device)).square().mean()
        loss.backward()
        optimizer.step()
        log.write(f"{step} {loss.item():.9g}\n")
        time.sleep(0.1)
    digest = hashlib.sha256()
    for parameter in net.parameters():
        values = [parameter.detach(), *(optimizer.state[parameter][name] for name in ("exp_avg", "exp_avg_sq", "step"))]
        for value in values:
            digest.update(value.cpu().numpy().tobytes())
    (args.out / f"r{rank}.final").write_text(digest.hexdigest())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
