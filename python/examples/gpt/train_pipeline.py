"""Trains a GPT with torch.distributed.pipelining: one stage per rank (two per rank if interleaved).

torchrun --nproc-per-node 4 python/examples/gpt/train_pipeline.py --steps 200 --schedule 1F1B
"""

from __future__ import annotations

import hashlib
import time
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from data import VOCABULARY, StandardLibrary
from job import LossLog, digest, parser, place
from model import GPT, loss_of
from torch import nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
)
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, DistributedSampler


def cut(model: GPT, stages: int) -> list[nn.Sequential]:
    """Cuts the sequence of layers into `stages` runs of nearly equal length."""
    layers = list(model)
    bounds = [len(layers) * stage // stages for stage in range(stages + 1)]
    return [nn.Sequential(*layers[begin:end]) for begin, end in pairwise(bounds)]


def main() -> None:
    options = parser("Trains a GPT with torch.distributed.pipelining.")
    options.add_argument("--schedule", choices=["GPipe", "1F1B", "Interleaved1F1B"], default="1F1B")
    options.add_argument("--microbatches", type=int, default=0, help="default: one per window")
    args = options.parse_args()
    device = place(args.device)
    dist.init_process_group(backend=args.backend)
    rank = dist.get_rank()
    world = dist.get_world_size()
    microbatches = args.microbatches or args.batch

    torch.manual_seed(args.seed)
    model = GPT(VOCABULARY, args.layers, args.width, args.context, dropout=args.dropout)
    if args.schedule == "Interleaved1F1B":
        mine = [rank, rank + world]
        parts = cut(model, 2 * world)
    else:
        mine = [rank]
        parts = cut(model, world)
    modules = nn.ModuleList(parts[stage].to(device) for stage in mine)
    stages: list[Any] = [
        PipelineStage(module, stage, len(parts), device) for stage, module in zip(mine, modules, strict=True)
    ]

    def share(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return loss_of(logits, targets) / float(args.accumulate)

    schedule: Any
    if args.schedule == "Interleaved1F1B":
        schedule = ScheduleInterleaved1F1B(stages, microbatches, loss_fn=share)
    elif args.schedule == "1F1B":
        schedule = Schedule1F1B(stages[0], microbatches, loss_fn=share)
    else:
        schedule = ScheduleGPipe(stages[0], microbatches, loss_fn=share)
    optimizer = torch.optim.AdamW(modules.parameters(), lr=args.learning_rate)
    scheduler = CosineAnnealingLR(optimizer, T_max=args.steps)

    # All stages work on the same windows: one replica of the data.
    dataset = StandardLibrary(args.context, args.samples)
    sampler: DistributedSampler[tuple[torch.Tensor, torch.Tensor]] = DistributedSampler(
        dataset, num_replicas=1, rank=0, shuffle=True, seed=args.seed, drop_last=True
    )
    loader = DataLoader(dataset, batch_size=args.batch, sampler=sampler, num_workers=args.workers, drop_last=True)
    epochs = -(-args.steps // (len(loader) // args.accumulate))

    torch.manual_seed(args.seed + 1 + rank)
    log = LossLog(args.loss_log, rank)
    step = 0
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        total = torch.zeros((), device=device)
        for i, (tokens, targets) in enumerate(loader):
            losses: list[torch.Tensor] = []
            inputs = (tokens.to(device),) if rank == 0 else ()
            if rank == world - 1:
                schedule.step(*inputs, target=targets.to(device), losses=losses)
                total += torch.stack(losses).mean()
            else:
                schedule.step(*inputs)
            if (i + 1) % args.accumulate != 0:
                continue

            norm = torch.nn.utils.get_total_norm([p.grad for p in modules.parameters() if p.grad is not None])
            squares = norm.square()
            dist.all_reduce(squares)
            torch.nn.utils.clip_grads_with_norm_(modules.parameters(), 1.0, squares.sqrt())
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()

            step += 1
            dist.broadcast(total, src=world - 1)
            log.write(step, total.item())
            if rank == 0:
                print(f"step {step} loss {total.item():.6f}", flush=True)
            total.zero_()
            if args.step_delay_ms:
                time.sleep(args.step_delay_ms / 1000)
            if step == args.steps:
                break
        optimizer.zero_grad()

    digests = [""] * world
    dist.all_gather_object(digests, digest(modules.state_dict().items(), optimizer))
    if rank == 0:
        print(f"final {hashlib.sha256(''.join(digests).encode()).hexdigest()}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
