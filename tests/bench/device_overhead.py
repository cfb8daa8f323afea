"""What a snapshot at every step costs a GPT that trains on one real GPU, and how fast its state
leaves the device.

One rank, so that it copies all of the state, where replicas would share it: the worst case. The
shapes are GPT-2's, a step is that of nanoGPT: bf16, batches of 1,024 tokens a sequence, gradients
accumulated over micro-batches, fused AdamW. Blocks with and without snapshots alternate in one run,
and each is compared with the blocks without before and after it; the first step of each is not
counted. `memcpy` is torch's copy of as many bytes from the device into pinned memory, in one piece:
what no snapshot can be faster than.

Ways: reft's snapshots under each of its policies, and what a script can write without reft, at
every step too, into a file system in memory: `async_save` of torch.distributed.checkpoint, which
waits for its predecessor, and `save`, torch.save of both state dicts.

    python tests/bench/device_overhead.py [--models 124M 774M] [--ways gap eager async_save save]
                                          [--blocks 6] [--steps 8] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.support import report

# Layers, width, heads, sequences in a micro-batch, micro-batches in a step.
SHAPES = {"124M": (12, 768, 12, 12, 5), "774M": (36, 1280, 20, 8, 5)}
VOCABULARY, CONTEXT = 50304, 1024
REFT_WAYS = ("gap", "eager", "sync")
SCRIPT_WAYS = ("async_save", "save")


def worker(args: argparse.Namespace) -> None:
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    torch.set_float32_matmul_precision("high")
    dist.init_process_group(backend="reft", device_id=device)
    import reft
    from reft._session import current

    layers, width, heads, batch, micro_batches = SHAPES[args.model]

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
            self.parts, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
            self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            parts = self.parts(self.first(x)).chunk(3, dim=-1)
            query, key, value = (p.unflatten(-1, (heads, -1)).transpose(1, 2) for p in parts)
            mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
            x = x + self.out(mixed.transpose(1, 2).flatten(2))
            return x + self.narrow(nn.functional.gelu(self.wide(self.second(x))))

    torch.manual_seed(0)
    with device:
        head = nn.Linear(width, VOCABULARY, bias=False)
        model = nn.Sequential(
            nn.Embedding(VOCABULARY, width), *[Block() for _ in range(layers)], nn.LayerNorm(width), head
        )
        model[0].weight = head.weight
    ddp = DistributedDataParallel(model, device_ids=[0])
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-4, fused=True)
    scratch = tempfile.mkdtemp(prefix="reft-bench-", dir="/dev/shm")
    pending: list[Any] = []

    def save() -> None:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        if args.way == "save":
            torch.save(state, f"{scratch}/state.pt")
            return
        if pending:
            pending.pop().result()
        path = f"{scratch}/{time.monotonic_ns() % 2}"
        shutil.rmtree(path, ignore_errors=True)
        pending.append(dcp.async_save(state, checkpoint_id=path))

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        for micro in range(micro_batches):
            ddp.require_backward_grad_sync = micro == micro_batches - 1
            ids = torch.randint(VOCABULARY, (batch, CONTEXT), device=device)
            with torch.autocast("cuda", torch.bfloat16):
                loss = nn.functional.cross_entropy(ddp(ids).flatten(0, 1), ids.flatten())
            loss.backward()
        optimizer.step()

    def block(on: bool) -> float:
        """Seconds a step."""
        saves = on and args.way in SCRIPT_WAYS
        current.set_enabled(on)
        step()
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(args.steps):
            step()
            if saves:
                save()
        torch.cuda.synchronize()
        spent = (time.perf_counter() - begin) / args.steps
        while pending:
            pending.pop().result()
        return spent

    block(True)
    off, on, ratio = [block(False)], [], []
    start = reft.status()
    for _ in range(args.blocks):
        on.append(block(True))
        off.append(block(False))
        ratio.append(2 * on[-1] / (off[-2] + off[-1]))
    status = reft.status()
    state_bytes = 3 * sum(p.nbytes for p in model.parameters())
    source = torch.empty(state_bytes, dtype=torch.uint8, device=device)
    target = torch.empty(source.shape, dtype=torch.uint8, pin_memory=True)
    memcpy = []
    for _ in range(6):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        target.copy_(source)
        memcpy.append(time.perf_counter() - begin)
    found: dict[str, Any] = {"off": off, "on": on, "ratio": ratio, "memcpy": memcpy[1:]}
    found["device"] = torch.cuda.get_device_name()
    taken = max(1, status.get("captured", 0) - start.get("captured", 0))
    found["ms"] = {
        name: (status[f"{name}_ns"] - start[f"{name}_ns"]) / 1e6 / taken
        for name in ("capture", "gate", "device_gate")
        if status
    }
    found["status"] = {name: value for name, value in status.items() if isinstance(value, int)}
    shutil.rmtree(scratch)
    (Path(args.out) / "0.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=["124M"], choices=sorted(SHAPES))
    parser.add_argument("--ways", nargs="+", default=["gap", "eager"], choices=[*REFT_WAYS, *SCRIPT_WAYS])
    parser.add_argument("--blocks", type=int, default=6)
    parser.add_argument("--steps", type=int, default=8, help="counted steps in a block")
    parser.add_argument("--way", help=argparse.SUPPRESS)
    parser.add_argument("--model", help=argparse.SUPPRESS)
    if (args := report.arguments(parser, worker)) is None:
        return 0
    import torch

    if not torch.cuda.is_available():
        print("bench device_overhead: torch finds no GPU here", file=sys.stderr)
        return 2
    metrics, failed, notes = {}, 0, []
    for model in args.models:
        for way in args.ways:
            with tempfile.TemporaryDirectory() as scratch:
                words = {"model": model, "way": way, "blocks": args.blocks, "steps": args.steps}
                settings = {"REFT_SNAPSHOT_POLICY": way} if way in REFT_WAYS else {"REFT_SNAPSHOT": "0"}
                ranks = report.run_ranks(__file__, 1, Path(scratch), words, settings)
            if ranks is None:
                failed += 1
                continue
            (found,) = ranks
            p, status = f"{model}_{way}_", found["status"]
            middle, error = report.interval(found["ratio"])
            percent, spread = 100 * (middle - 1), 100 * error
            goal = ("<= 1", report.at_most(percent, spread, 1)) if way in REFT_WAYS else ("", None)
            metrics[p + "overhead"] = report.metric(percent, "%", spread, *goal)
            for name in ("off", "on", "memcpy"):
                values = [1e3 * value for value in found[name]]
                metrics[p + name] = report.metric(report.median(values), "ms", report.mad(values))
            for name, value in found["ms"].items():
                metrics[p + name] = report.metric(value, "ms")
            note = f"{model} {way}, {found['device']}"
            if status:
                metrics[p + "bytes_copied_per_step"] = report.metric(status["payload_bytes"], "B")
                counts = ("captured", "sealed", "dropped", "skipped")
                note += ": " + ", ".join(f"{status[name]} {name}" for name in counts)
            notes.append(note)
    report.write(args.json, "bench device_overhead", metrics, len(args.models) * len(args.ways), failed, 0, notes)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
