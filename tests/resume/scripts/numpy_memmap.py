# ranks: 2; kills: 2 6 10
# The style of nanoGPT: np arrays as data, np.random for the batches, learning rate by a function,
# no DataLoader.
import math

import numpy as np
import torch
import torch.distributed as dist
from digest import digest
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

learning_rate, warmup_iters, decay_iters, min_lr = 1e-2, 3, 10, 1e-3
max_iters, block_size, batch_size, eval_interval = 12, 8, 4, 4


def get_lr(it):
    if it < warmup_iters:
        return learning_rate * (it + 1) / warmup_iters
    ratio = min(1.0, (it - warmup_iters) / (decay_iters - warmup_iters))
    return min_lr + 0.5 * (1 + math.cos(math.pi * ratio)) * (learning_rate - min_lr)


dist.init_process_group(backend="reft")
ddp_rank = dist.get_rank()
np.random.seed(1337 + ddp_rank)
torch.manual_seed(1337)
corpus = np.array([(i * i + 3 * i) % 19 for i in range(500)], dtype=np.uint16)
raw = nn.Sequential(nn.Embedding(19, 8), nn.Linear(8, 16), nn.GELU(), nn.Dropout(0.1), nn.Linear(16, 19))
model = DDP(raw)
optimizer = torch.optim.AdamW(raw.parameters(), lr=learning_rate, betas=(0.9, 0.95))


def get_batch():
    ix = np.random.randint(0, len(corpus) - block_size - 1, size=batch_size)
    x = torch.stack([torch.from_numpy(corpus[i : i + block_size].astype(np.int64)) for i in ix])
    y = torch.stack([torch.from_numpy(corpus[i + 1 : i + 1 + block_size].astype(np.int64)) for i in ix])
    return ix, x, y


iter_num, best_val_loss, running_mfu = 0, 1e9, -1.0
ids, X, Y = get_batch()
while True:
    lr = get_lr(iter_num)
    for group in optimizer.param_groups:
        group["lr"] = lr
    if iter_num % eval_interval == 0:
        model.eval()
        with torch.no_grad():
            losses = torch.zeros(3)
            for k in range(3):
                _, a, b = get_batch()
                losses[k] = nn.functional.cross_entropy(raw(a).flatten(0, 1), b.flatten())
        model.train()
        best_val_loss = min(best_val_loss, losses.mean().item())
    loss = nn.functional.cross_entropy(model(X).flatten(0, 1), Y.flatten())
    used = ids
    ids, X, Y = get_batch()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(raw.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    running_mfu = loss.item() if running_mfu < 0 else 0.9 * running_mfu + 0.1 * loss.item()
    print(
        f"r{ddp_rank} iter {iter_num} loss {loss.item().hex()} ids {used.tolist()} val {best_val_loss.hex()}",
        flush=True,
    )
    iter_num += 1
    if iter_num >= max_iters:
        break
print(
    f"r{ddp_rank} final {iter_num} {best_val_loss.hex()} {running_mfu.hex()} {lr} {digest(raw, optimizer)}", flush=True
)
dist.destroy_process_group()
