"""A training of a few steps, for tests of how ranks are launched. Each rank prints `r<rank> <step>
<loss>` after each step, and at its end `r<rank> final <loss>, committed <step>`.

    python short_training.py --lr 0.1 [--steps 8] [--kill RANK:STEP] [--init tcp://…] [--until FILE]

Ranks come from the environment. `--kill` has a rank kill itself after it has printed that step,
unless the file that KILLED names is there, which it makes: once. `--until` has a single rank go on
until a file is there.
"""

from __future__ import annotations

import argparse
import os
import signal

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import reft


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--kill", default="")
    parser.add_argument("--init", default="env://")
    parser.add_argument("--until", default="")
    return parser.parse_args(argv)


def say(text: str) -> None:
    os.write(1, f"{text}\n".encode())


def kill_once() -> None:
    mark = os.environ["KILLED"]
    if not os.path.exists(mark):
        open(mark, "w").close()
        os.kill(os.getpid(), signal.SIGKILL)


def train(rank: int, world: int, options: argparse.Namespace) -> None:
    dist.init_process_group("reft", init_method=options.init, rank=rank, world_size=world)
    torch.manual_seed(3)
    model = DistributedDataParallel(torch.nn.Linear(4, 4))
    optimizer = torch.optim.Adam(model.parameters(), lr=options.lr)
    loss = torch.zeros(())
    for step in range(10**9 if options.until else options.steps):
        if options.until and os.path.exists(options.until):
            break
        x = torch.randn(4, 4)
        optimizer.zero_grad()
        loss = (model(x) - x.roll(1, 1)).square().mean()
        loss.backward()
        optimizer.step()
        say(f"r{rank} {step} {loss.item().hex()}")
        if options.kill == f"{rank}:{step}":
            kill_once()
    say(f"r{rank} final {loss.item().hex()}, committed {reft.snapshot_now(10)}")
    dist.destroy_process_group()


if __name__ == "__main__":
    train(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), arguments())
