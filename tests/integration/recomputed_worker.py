"""Trains with ZeroRedundancyOptimizer on plain gloo, and compares what each rank keeps with what the
other ranks of its set have computed of it. One rank per process, two or three of them.

    torchrun … recomputed_worker.py --steps 1000 --out FILE

Clipping, warm-up by a schedule, two parameter groups, and a gradient scaler that skips steps. Writes
{case: number of steps after which all tensors were equal, or the first that was not}.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from reft._state import recomputed
from reft._state.recomputed import of_process

CASES: dict[str, Callable[..., Any]] = {
    "sgd": lambda p, **k: ZeroRedundancyOptimizer(p, torch.optim.SGD, **k),
    "momentum": lambda p, **k: ZeroRedundancyOptimizer(p, torch.optim.SGD, momentum=0.9, nesterov=True, **k),
    "adam": lambda p, **k: ZeroRedundancyOptimizer(p, torch.optim.Adam, weight_decay=0.01, **k),
    "adamw": lambda p, **k: ZeroRedundancyOptimizer(p, torch.optim.AdamW, **k),
    "amsgrad": lambda p, **k: ZeroRedundancyOptimizer(p, torch.optim.AdamW, amsgrad=True, **k),
    "maximize": lambda p, **k: ZeroRedundancyOptimizer(p, torch.optim.AdamW, maximize=True, **k),
    "foreach": lambda p, **k: ZeroRedundancyOptimizer(p, torch.optim.AdamW, foreach=True, **k),
    "fused": lambda p, **k: ZeroRedundancyOptimizer(p, torch.optim.AdamW, fused=True, **k),
    "bucket_view": lambda p, **k: ZeroRedundancyOptimizer(p, torch.optim.AdamW, parameters_as_bucket_view=True, **k),
    "rmsprop": lambda p, **k: ZeroRedundancyOptimizer(p, torch.optim.RMSprop, momentum=0.5, centered=True, **k),
    "without a thread": lambda p, **k: ZeroRedundancyOptimizer(p, torch.optim.AdamW, **k),
    "adamax": lambda p, **k: ZeroRedundancyOptimizer(p, torch.optim.Adamax, **k),
    "nadam": lambda p, **k: ZeroRedundancyOptimizer(p, torch.optim.NAdam, **k),
    "radam": lambda p, **k: ZeroRedundancyOptimizer(p, torch.optim.RAdam, **k),
    "rprop": lambda p, **k: ZeroRedundancyOptimizer(p, torch.optim.Rprop, **k),
    "asgd": lambda p, **k: ZeroRedundancyOptimizer(p, torch.optim.ASGD, **k),
    "adadelta": lambda p, **k: ZeroRedundancyOptimizer(p, torch.optim.Adadelta, **k),
    "adagrad": lambda p, **k: ZeroRedundancyOptimizer(p, torch.optim.Adagrad, **k),
}
# Those that reft advances itself, once it has seen that the bits are torch's.
BY_RULE = ("sgd", "momentum", "adam", "adamw", "amsgrad", "maximize", "foreach", "bucket_view", "without a thread")


def digest(state: dict[str, Any]) -> str:
    sha = hashlib.sha256()
    for name in sorted(state):
        if isinstance(state[name], torch.Tensor):
            sha.update(name.encode() + state[name].detach().contiguous().numpy().tobytes())
    return sha.hexdigest()[:16]


def differences(model: nn.Module, optimizer: Any) -> list[str]:
    """Parameters whose state is not the same on the rank that keeps it and on one that computes it."""
    names = {id(p): name for name, p in model.named_parameters()}
    kept = {names[id(p)]: digest(optimizer.optim.state[p]) for p in optimizer.optim.state}
    beside = {names[id(p)]: digest(held[key]) for p, held, key in of_process.held_beside(optimizer.optim)}
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, (of_process.ranks_of(optimizer.optim), kept, beside))
    owned = {name: value for _, mine, _ in everywhere for name, value in mine.items()}
    found = []
    for ranks, mine, theirs in everywhere:
        expected = {name for rank in ranks for name in everywhere[rank][1]} - set(mine)
        found += sorted(expected ^ set(theirs))
        found += [name for name, value in theirs.items() if owned.get(name) != value]
    return found


def train(make: Callable[..., Any], steps: int, spoil: int = -1, is_by_rule: bool = True) -> str:
    """Args:
    spoil: the step after which one number that was computed a second time is another one.
    is_by_rule: it is advanced without torch in the end.
    """
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(24, 48), nn.GELU(), nn.LayerNorm(48), nn.Linear(48, 300), nn.Tanh(), nn.Linear(300, 5))
    model = DistributedDataParallel(net)
    weights = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() == 1]
    optimizer = make([{"params": weights}, {"params": others, "lr": 1e-3}], lr=3e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 50))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=20)
    noise = torch.Generator().manual_seed(dist.get_rank())
    skipped = 0
    for step in range(steps):
        x = torch.randn(6, 24, generator=noise)
        loss = model(x).square().mean()
        loss = loss * float("inf") if step % 97 == 41 else loss
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        before = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        skipped += scaler.get_scale() < before
        schedule.step()
        optimizer.zero_grad()
        if step == spoil and dist.get_rank() == 1:
            _, held, key = of_process.held_beside(optimizer.optim)[0]
            held[key]["exp_avg"].view(-1)[7:8].add_(1.0)
        looks = step in (0, 1, 2) or step % 100 == 99 or step == steps - 1
        if looks and (found := differences(model, optimizer)):
            return f"step {step + 1}: {found[:3]} of {len(found)}"
    if steps > 41 and not skipped:
        return "no step was skipped"
    replicas = of_process._sharded[optimizer].replicas.values()
    if bool(sum(replica.advanced for replica in replicas)) != is_by_rule:
        return "computed by torch" if is_by_rule else "computed by reft"
    return "equal"


def loads(steps: int) -> str:
    """A checkpoint of the script's own comes before the first step."""
    results = []
    state: Any = None
    for part in range(2):
        torch.manual_seed(4)
        model = DistributedDataParallel(nn.Linear(20, 20))
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-2)
        if part == 1:
            optimizer.load_state_dict(state)
        for _ in range(steps):
            model(torch.randn(4, 20)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append(differences(model, optimizer))
        optimizer.consolidate_state_dict(0)
        whole = [optimizer.state_dict() if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(whole)
        state = whole[0]
    return "equal" if not any(results) else str(results)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    register_optimizer_step_pre_hook(
        lambda optimizer, args, kwargs: of_process.begin(optimizer, (*args[1:], *kwargs.values()))
    )
    register_optimizer_step_post_hook(lambda optimizer, *_: of_process.end(optimizer))
    found = {}
    least = recomputed._IN_PLACE
    for name, make in CASES.items():
        recomputed._IN_PLACE = least if name == "without a thread" else 0
        of_process.watch(list(range(dist.get_world_size())))
        found[name] = train(make, args.steps, is_by_rule=name in BY_RULE)
        found[f"{name}: problems"] = of_process.take_problems() or "none"
        of_process.forget()
    of_process.watch(list(range(dist.get_world_size())))
    found["spoiled"] = train(CASES["adamw"], 99, spoil=60)
    of_process.forget()
    of_process.watch(list(range(dist.get_world_size())))
    found["loads"] = loads(5)
    of_process.forget()
    if dist.get_rank() == 0:
        args.out.write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
