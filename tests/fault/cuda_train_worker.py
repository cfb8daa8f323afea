"""A small training script on CUDA devices that a kill interrupts: nothing of reft in it but the backend's name.

    cuda_train_worker.py --backend reft --steps 12 --out DIR [--optimizer adamw|sgd|fused] [--delay SEC]

Writes what `train_worker.py` writes. BatchNorm buffers, a DataLoader, a schedule, clipping, a running sum on the device and one on
the host take part; no random numbers of the device, which stand-in devices have none of.
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
from torch.utils.data import DataLoader, TensorDataset
from train_worker import RunLog, add


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", default="reft")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--delay", type=float, default=0, help="seconds to sleep after each step")
    parser.add_argument("--optimizer", choices=["adamw", "sgd", "fused"], default="adamw")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    log = RunLog(args.out)
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    device = torch.device("cuda", torch.cuda.current_device())
    dist.init_process_group(args.backend)
    rank = dist.get_rank()

    torch.manual_seed(5)
    features = torch.randn(56, 32)
    loader = DataLoader(TensorDataset(features, features[:, :4].argmax(dim=1)), batch_size=8, shuffle=True)
    net = nn.Sequential(nn.Linear(32, 64), nn.BatchNorm1d(64), nn.GELU(), nn.Linear(64, 4)).to(device)
    model = DistributedDataParallel(net, device_ids=[device.index])
    optimizer: torch.optim.Optimizer
    if args.optimizer == "sgd":
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=args.optimizer == "fused")
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5, gamma=0.8)
    torch.manual_seed(100 + rank)
    total = torch.zeros((), device=device)
    seen, step = 0.0, 0
    while step < args.steps:
        for inputs, targets in loader:
            loss = nn.functional.cross_entropy(model(inputs.to(device)), targets.to(device))
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            total += loss.detach()
            seen += loss.item()
            step += 1
            log.line(step, loss)
            time.sleep(args.delay)
            if step >= args.steps:
                break
    digest = hashlib.sha256()
    add(digest, {name: tensor.cpu() for name, tensor in net.state_dict().items()})
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            add(digest, {k: v.cpu() if torch.is_tensor(v) else v for k, v in optimizer.state[parameter].items()})
    add(digest, [scheduler.get_last_lr(), torch.get_rng_state(), total.cpu(), seen, step])
    (args.out / f"r{rank}.final").write_text(digest.hexdigest())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
