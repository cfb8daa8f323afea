"""What the three training scripts share: options, where they run, the loss log, the final hash."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import time
from collections.abc import Iterable
from typing import Any

import torch


def parser(description: str) -> argparse.ArgumentParser:
    """Options of every script."""
    options = argparse.ArgumentParser(description=description)
    options.add_argument("--backend", default="reft")
    options.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    options.add_argument("--steps", type=int, default=100, help="optimizer steps")
    options.add_argument("--layers", type=int, default=4)
    options.add_argument("--width", type=int, default=128, help="a multiple of 4, the number of heads")
    options.add_argument("--batch", type=int, default=8, help="windows per rank and iteration")
    options.add_argument("--context", type=int, default=128, help="bytes per window")
    options.add_argument("--accumulate", type=int, default=1, help="iterations per optimizer step")
    options.add_argument("--samples", type=int, default=0, help="windows per epoch; 0: the whole text")
    options.add_argument("--workers", type=int, default=0, help="processes per rank that read data")
    options.add_argument("--dropout", type=float, default=0.1)
    options.add_argument("--learning-rate", type=float, default=1e-3)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--step-delay-ms", type=float, default=0, help="sleep so long after every step")
    options.add_argument("--loss-log", default="", metavar="FILE", help="append one JSON line per rank and step")
    return options


def place(device: str) -> torch.device:
    """The device of this rank, made the current one."""
    torch.set_num_threads(1)
    if device == "cpu":
        return torch.device("cpu")
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    return torch.device("cuda", torch.cuda.current_device())


class LossLog:
    """Lines {"rank", "step", "loss", "time"}; the loss is exact (float.hex). Ranks may share the file."""

    def __init__(self, path: str, rank: int) -> None:
        self.path = path
        self.rank = rank

    def write(self, step: int, loss: float) -> None:
        """Appends one line: a killed process leaves whole lines only."""
        if self.path:
            line = json.dumps({"rank": self.rank, "step": step, "loss": loss.hex(), "time": time.time()})
            with open(self.path, "a", encoding="ascii") as file:
                file.write(line + "\n")


def full(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself, or a sharded one put together: then all ranks have to call."""
    whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return whole.detach().cpu().contiguous()


def digest(named: Iterable[tuple[str, torch.Tensor]], optimizer: torch.optim.Optimizer) -> str:
    """SHA-256 over all named tensors and over the optimizer's state. All ranks have to call it."""
    sha = hashlib.sha256()
    for name, tensor in named:
        sha.update(name.encode())
        sha.update(full(tensor).numpy().tobytes())
    state: dict[int, dict[str, Any]] = optimizer.state_dict()["state"]
    for index in sorted(state):
        for name in sorted(state[index]):
            value = state[index][name]
            sha.update(f"{index}.{name}".encode())
            sha.update(full(value).numpy().tobytes() if torch.is_tensor(value) else repr(value).encode())
    return sha.hexdigest()
