# ranks: 2; kills: 3 7 11
# The training script that people copy: configuration by globals, memory-mapped tokens, gradient
# accumulation with require_backward_grad_sync, estimate_loss with its own context, prefetch of the
# next batch, prints of loss and mfu.
import math
import os
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.distributed import destroy_process_group, init_process_group
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

from tests.resume.scripts.digest import digest

eval_interval = 5
eval_iters = 2
log_interval = 1
gradient_accumulation_steps = 4
batch_size = 2
block_size = 16
n_layer, n_head, n_embd, dropout = 2, 2, 16, 0.1
learning_rate, max_iters, weight_decay, beta1, beta2, grad_clip = 1e-3, 12, 1e-1, 0.9, 0.95, 1.0
decay_lr, warmup_iters, lr_decay_iters, min_lr = True, 3, 12, 1e-4
backend = "reft"
device_type = "cpu"
config_keys = [k for k, v in globals().items() if not k.startswith("_") and isinstance(v, (int, float, bool, str))]
config = {k: globals()[k] for k in config_keys}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(n_embd), nn.LayerNorm(n_embd)
        self.c_attn, self.c_proj = nn.Linear(n_embd, 3 * n_embd), nn.Linear(n_embd, n_embd)
        self.mlp = nn.Sequential(
            nn.Linear(n_embd, 4 * n_embd), nn.GELU(), nn.Linear(4 * n_embd, n_embd), nn.Dropout(dropout)
        )

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = (
            p.view(b, t, n_head, c // n_head).transpose(1, 2) for p in self.c_attn(self.ln_1(x)).split(n_embd, dim=2)
        )
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout if self.training else 0.0, is_causal=True)
        x = x + self.c_proj(y.transpose(1, 2).reshape(b, t, c))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self, vocab_size):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab_size, n_embd), nn.Embedding(block_size, n_embd)
        self.h = nn.ModuleList(Block() for _ in range(n_layer))
        self.ln_f, self.lm_head = nn.LayerNorm(n_embd), nn.Linear(n_embd, vocab_size, bias=False)
        self.wte.weight = self.lm_head.weight

    def forward(self, idx, targets):
        x = self.wte(idx) + self.wpe(torch.arange(idx.shape[1]))
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())


ddp = int(os.environ.get("RANK", -1)) != -1
init_process_group(backend=backend)
ddp_rank = int(os.environ["RANK"])
ddp_world_size = int(os.environ["WORLD_SIZE"])
master_process = ddp_rank == 0
seed_offset = ddp_rank
assert gradient_accumulation_steps % ddp_world_size == 0
gradient_accumulation_steps //= ddp_world_size
torch.manual_seed(1337 + seed_offset)
ctx = nullcontext() if device_type == "cpu" else torch.amp.autocast(device_type=device_type)

data_dir = Path(tempfile.mkdtemp())
for split in ("train", "val"):
    text = (
        Path(torch.__file__).read_bytes()[20_000:36_000]
        if split == "train"
        else Path(torch.__file__).read_bytes()[:8_000]
    )
    np.frombuffer(text, dtype=np.uint8).astype(np.uint16).tofile(data_dir / f"{split}.bin")


def get_batch(split):
    data = np.memmap(data_dir / f"{split}.bin", dtype=np.uint16, mode="r")
    ix = torch.randint(len(data) - block_size, (batch_size,))
    x = torch.stack([torch.from_numpy(data[i : i + block_size].astype(np.int64)) for i in ix])
    y = torch.stack([torch.from_numpy(data[i + 1 : i + 1 + block_size].astype(np.int64)) for i in ix])
    return x, y


iter_num = 0
best_val_loss = 1e9
torch.manual_seed(1337)
model = GPT(256)
torch.manual_seed(1337 + seed_offset)
decay = [p for p in model.parameters() if p.dim() >= 2]
rest = [p for p in model.parameters() if p.dim() < 2]
groups = [{"params": decay, "weight_decay": weight_decay}, {"params": rest, "weight_decay": 0.0}]
optimizer = torch.optim.AdamW(groups, lr=learning_rate, betas=(beta1, beta2))
scaler = torch.amp.GradScaler(device_type, enabled=False)
model = DDP(model)


@torch.no_grad()
def estimate_loss():
    out = {}
    model.eval()
    for split in ["train", "val"]:
        losses = torch.zeros(eval_iters)
        for k in range(eval_iters):
            X, Y = get_batch(split)
            with ctx:
                logits, loss = raw_model(X, Y)
            losses[k] = loss.item()
        out[split] = losses.mean()
    model.train()
    return out


def get_lr(it):
    if it < warmup_iters:
        return learning_rate * (it + 1) / (warmup_iters + 1)
    if it > lr_decay_iters:
        return min_lr
    decay_ratio = (it - warmup_iters) / (lr_decay_iters - warmup_iters)
    return min_lr + 0.5 * (1.0 + math.cos(math.pi * decay_ratio)) * (learning_rate - min_lr)


X, Y = get_batch("train")
t0 = time.time()
local_iter_num = 0
raw_model = model.module
running_mfu = -1.0
while True:
    lr = get_lr(iter_num) if decay_lr else learning_rate
    for param_group in optimizer.param_groups:
        param_group["lr"] = lr
    if iter_num % eval_interval == 0:
        losses = estimate_loss()
        print(
            f"r{ddp_rank} step {iter_num}: train {losses['train'].item().hex()} val {losses['val'].item().hex()}",
            flush=True,
        )
        if losses["val"] < best_val_loss:
            best_val_loss = losses["val"]
    for micro_step in range(gradient_accumulation_steps):
        model.require_backward_grad_sync = micro_step == gradient_accumulation_steps - 1
        with ctx:
            logits, loss = model(X, Y)
            loss = loss / gradient_accumulation_steps
        first = X[0, :4].tolist()
        X, Y = get_batch("train")
        scaler.scale(loss).backward()
    if grad_clip != 0.0:
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    t1 = time.time()
    dt = t1 - t0
    t0 = t1
    if iter_num % log_interval == 0:
        lossf = loss.item() * gradient_accumulation_steps
        if local_iter_num >= 5:
            running_mfu = 1.0 if running_mfu == -1.0 else 0.9 * running_mfu + 0.1
        print(
            f"r{ddp_rank} iter {iter_num}: loss {lossf.hex()} ids {first} mfu {running_mfu.hex()} lr {lr.hex()}",
            flush=True,
        )
    iter_num += 1
    local_iter_num += 1
    if iter_num > max_iters:
        break
print(f"r{ddp_rank} final {iter_num} {float(best_val_loss).hex()} {running_mfu.hex()}", flush=True)
print(f"r{ddp_rank} final {digest(model, optimizer)}", flush=True)
destroy_process_group()
