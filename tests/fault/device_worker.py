"""Started by torchrun: a training of which one rank gives its device something that keeps it.

    device_worker.py KIND RANK SECONDS STEPS

What KIND means is in `device_campaign.py`; it happens at step FAULT_STEP, on rank RANK. A rank that
does it writes "injected" to the terminal.
"""

from __future__ import annotations

import ctypes
import sys
import time

import torch
import torch.distributed as dist
from torch import nn

FAULT_STEP = 30
CYCLES_PER_SEC = 1_700_000_000


def driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def keep_busy(seconds: int) -> None:
    """Enqueues a kernel of so many seconds on the current stream."""
    stream = torch.cuda.current_stream().cuda_stream
    try:
        launch = driver().fake_cuda_launch
    except AttributeError:  # a real device
        torch.cuda._sleep(seconds * CYCLES_PER_SEC)
        return
    sleep = ctypes.cast(ctypes.CDLL(None).sleep, ctypes.c_void_p)
    assert launch(ctypes.c_void_p(stream), sleep, ctypes.c_void_p(seconds)) == 0


def lose() -> None:
    """Has the device fail for good, as after an illegal access by a kernel."""
    try:
        driver().fake_cuda_fail(b"cudaMemcpyAsync", 1, 700, 1)
    except AttributeError:  # a real device
        torch.zeros(1, device="cuda")[torch.tensor([1 << 20], device="cuda")].item()
    torch.ones(1 << 10).cuda()


class Training:
    """One step after the other, all of the same shape on all ranks."""

    def __init__(self, kind: str, chosen: int, seconds: int) -> None:
        self.kind, self.seconds = kind, seconds
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.is_chosen = self.rank == chosen
        self.device = torch.device("cuda", self.rank)
        self.step = 0
        # With whom the chosen rank has a group of its own.
        self.pair = sorted({chosen, (chosen + 1) % self.world})
        self.pair_group = dist.new_group(self.pair)
        self.aside = torch.cuda.Stream()
        torch.manual_seed(0)
        self.model: nn.Module = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)).to(self.device)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        self.weights = [p for p in self.model.parameters() if p.dim() == 2]
        if kind == "ddp":
            self.model = nn.parallel.DistributedDataParallel(self.model)

    @property
    def injects(self) -> bool:
        """Whether this rank does it now."""
        if not self.is_chosen or self.step != FAULT_STEP:
            return False
        print("injected", flush=True)
        return True

    def before_the_op(self) -> None:
        if self.kind in ("kernel", "async", "long", "ddp", "late") and self.injects:
            keep_busy(self.seconds)
        elif self.kind == "event" and self.injects:
            with torch.cuda.stream(self.aside):
                keep_busy(self.seconds)
            torch.cuda.current_stream().wait_stream(self.aside)
        elif self.kind == "inner":
            if self.injects:
                keep_busy(self.seconds)
            if self.rank in self.pair:
                dist.all_reduce(self.weights[0].grad, group=self.pair_group)
        elif self.kind in ("lost", "fatal") and self.injects:
            lose()
        elif self.kind == "sync" and self.injects:
            keep_busy(self.seconds)
            torch.cuda.current_stream().synchronize()
        elif self.kind == "uneven" and self.is_chosen and self.step % 3 == 0:
            keep_busy(1)

    def reduce(self) -> None:
        if self.kind == "pipe":
            token = torch.ones(1 << 14, device=self.device)
            if self.rank > 0:
                dist.recv(token, self.rank - 1)
            if self.injects:
                keep_busy(self.seconds)
            if self.rank + 1 < self.world:
                dist.send(token, self.rank + 1)
        elif self.kind == "async":
            works = [dist.all_reduce(w.grad, async_op=True) for w in self.weights]
            for work in works:
                work.wait()
        elif self.kind != "ddp":
            for weight in self.weights:
                dist.all_reduce(weight.grad)

    def run(self, steps: int) -> None:
        for self.step in range(steps):
            try:
                self.one_step()
            except RuntimeError:
                if self.kind not in ("lost", "fatal") or not self.is_chosen:
                    raise
                time.sleep(0.01)  # as a script that skips a batch and goes on

    def one_step(self) -> None:
        self.optimizer.zero_grad()
        inputs = torch.ones(4, 32, device=self.device)
        if self.kind == "ddp":
            self.before_the_op()  # its ops are called within backward()
        loss = self.model(inputs).square().mean()
        loss.backward()
        if self.kind != "ddp":
            self.before_the_op()
        self.reduce()
        self.optimizer.step()
        loss.item()


def captured(training: Training, steps: int) -> None:
    """Every step replays a graph of the forward and the backward pass; collectives are outside."""
    inputs = torch.ones(4, 32, device=training.device)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            training.model(inputs).square().mean().backward()
    torch.cuda.current_stream().wait_stream(side)
    training.optimizer.zero_grad(set_to_none=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = training.model(inputs).square().mean()
        loss.backward()
    for training.step in range(steps):
        graph.replay()
        training.reduce()
        training.optimizer.step()
        loss.item()


def main() -> None:
    kind, chosen, seconds, steps = sys.argv[1], *map(int, sys.argv[2:5])
    dist.init_process_group(backend="reft")
    torch.cuda.set_device(dist.get_rank())
    training = Training(kind, chosen, seconds)
    if kind == "graph":
        captured(training, steps)
    else:
        training.run(steps)
    print(f"rank {dist.get_rank()} trained to the end", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
