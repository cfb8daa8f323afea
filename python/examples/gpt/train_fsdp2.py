"""Trains a GPT with fully_shard (FSDP2): parameters, gradients and optimizer state are sharded over
the ranks.

    torchrun --nproc-per-node 2 python/examples/gpt/train_fsdp2.py --steps 200

With --replicas R the ranks form R groups that each hold the whole state (HSDP).
"""

from __future__ import annotations

import time

import torch
import torch.distributed as dist
from data import VOCABULARY, StandardLibrary
from job import LossLog, digest, parser, place
from model import GPT, Block, loss_of
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, DistributedSampler


def main() -> None:
    options = parser("Trains a GPT with fully_shard.")
    options.add_argument("--replicas", type=int, default=1, help="groups of ranks that hold the same shards")
    args = options.parse_args()
    device = place(args.device)
    dist.init_process_group(backend=args.backend)
    rank = dist.get_rank()
    world = dist.get_world_size()

    if args.replicas > 1:
        mesh = init_device_mesh(
            args.device, (args.replicas, world // args.replicas), mesh_dim_names=("replicate", "shard")
        )
    else:
        mesh = init_device_mesh(args.device, (world,), mesh_dim_names=("shard",))

    torch.manual_seed(args.seed)
    model = GPT(VOCABULARY, args.layers, args.width, args.context, dropout=args.dropout).to(device)
    for layer in model:
        if isinstance(layer, Block):
            fully_shard(layer, mesh=mesh)
    sharded = fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate)
    scheduler = CosineAnnealingLR(optimizer, T_max=args.steps)

    dataset = StandardLibrary(args.context, args.samples)
    sampler: DistributedSampler[tuple[torch.Tensor, torch.Tensor]] = DistributedSampler(
        dataset, shuffle=True, seed=args.seed, drop_last=True
    )
    loader = DataLoader(dataset, batch_size=args.batch, sampler=sampler, num_workers=args.workers, drop_last=True)
    epochs = -(-args.steps // (len(loader) // args.accumulate))

    torch.manual_seed(args.seed + 1 + rank)  # every rank drops other activations
    log = LossLog(args.loss_log, rank)
    step = 0
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        total = 0.0
        for i, (tokens, targets) in enumerate(loader):
            last = (i + 1) % args.accumulate == 0
            sharded.set_requires_gradient_sync(last)
            loss = loss_of(model(tokens.to(device)), targets.to(device)) / args.accumulate
            loss.backward()
            total += loss.item()
            if not last:
                continue

            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()

            step += 1
            log.write(step, total)
            if rank == 0:
                print(f"step {step} loss {total:.6f}", flush=True)
            total = 0.0
            if args.step_delay_ms:
                time.sleep(args.step_delay_ms / 1000)
            if step == args.steps:
                break
        optimizer.zero_grad()

    final = digest(model.state_dict().items(), optimizer)
    if rank == 0:
        print(f"final {final}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
