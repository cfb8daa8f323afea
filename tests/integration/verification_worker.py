"""Trains a small model with random state, a loader, a scheduler and variables. In a restarted
process, one part of the restore is made wrong (PLANT), or a part of the state is one that no
snapshot has ("hidden"). KILL gives the steps after whose commit rank 0 kills itself: one for each
attempt. In the first restarted process, while it computes step 20 again, a rank may be killed
("killed"), fail ("raises"), or all may leave the loop ("leaves").

Prints `step N loss` lines and `final HASH`.
"""

from __future__ import annotations

import hashlib
import os
import random
import signal
import time
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import reft

PLANT = os.environ.get("PLANT", "")


def attempt() -> int:
    """Not a variable of the module: a resume would restore it."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def die_after(step: int, rank: int) -> None:
    kills = os.environ.get("KILL", "").split()
    if attempt() < len(kills) and kills[attempt()] == str(step):
        assert reft.snapshot_now() == step
        dist.barrier()  # steps `step - 1` and `step` lie in all vaults
        if rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)


def disturb(step: int, rank: int) -> bool:
    """At the start of the iteration after `step`. Returns whether the loop ends."""
    if attempt() != 1 or step != 19:
        return False
    if PLANT == "killed" and rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if PLANT == "raises" and rank == 0:
        raise FileExistsError("checkpoint-19")
    return PLANT == "leaves"


def plant() -> None:
    from reft import _continuation
    from reft._continuation import restore_walk
    from reft._continuation.kinds import loaders
    from reft._resume import arrangement, restorer
    from reft._session import small_state

    if PLANT == "random":
        _continuation.restore_rng = lambda state: None
    elif PLANT == "tensor":
        right = restorer.restore

        def restore(native: Any, state: Any, nodes: int) -> int:
            written = right(native, state, nodes)
            with torch.no_grad():
                tensor = state.regions[0].tensor
                tensor.copy_(tensor.flip(0))
            return written

        restorer.restore = restore
    elif PLANT == "position":
        put = loaders.LoaderIterator.restore

        def position(self: Any, *args: Any) -> Any:
            self.yielded += 1
            return put(self, *args)

        loaders.LoaderIterator.restore = position
    elif PLANT == "order":
        loaders.restore_rng = lambda state: None
    elif PLANT == "variable":
        resolve = restore_walk.RestoreWalk.resolve

        def stale(self: Any, encoded: Any, live: Any, place: str, *rest: Any) -> Any:
            if place.endswith(":total"):
                return restore_walk.KEEP
            return resolve(self, encoded, live, place, *rest)

        restore_walk.RestoreWalk.resolve = stale
    elif PLANT == "scheduler":
        small_state.restore_state_dicts = lambda *arguments: []
    elif PLANT == "optimizer":
        arrangement.Arrangement._optimizers = lambda made, state: None


def main() -> None:
    dist.init_process_group(backend="reft")
    rank = dist.get_rank()
    if attempt() > 0:
        plant()
    torch.manual_seed(rank)
    random.seed(rank)
    model = DistributedDataParallel(
        torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(0.2), torch.nn.Linear(16, 4))
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    data = torch.utils.data.TensorDataset(torch.randn(96, 8))
    loader = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True)
    hidden = hashlib.sha256()  # its state is in C, and nothing copies it
    total, started, noise, step = 0.0, time.time(), 0.0, 0
    for _ in range(2):
        for (batch,) in loader:
            if disturb(step, rank):
                break
            if PLANT == "hidden":
                hidden.update(b"step")
                batch = batch + hidden.digest()[0] / 256
            noise += random.random() * 1e-3
            loss = model(batch).square().mean() + noise * 0.0
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            step += 1
            total += loss.item()
            elapsed = time.time() - started
            print(f"r{rank} step {step} {loss.item()!r}", flush=True)
            assert elapsed > 0
            die_after(step, rank)
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().numpy().tobytes())
    print(f"r{rank} final {digest.hexdigest()[:16]} {total!r} {noise!r} {started > 0}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
