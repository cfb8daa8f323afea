"""Started by torchrun: a training whose rank 1 gives its device something that keeps it.

    device_hang_worker.py kernel|event|inner|long SECONDS STEPS

At step 30, before the all_reduce of all ranks: `kernel`, a kernel of so many seconds; `event`, the
stream waits for an event behind such a kernel on another stream; `inner`, ranks 1 and 2 reduce among
themselves first, for which rank 2's device is busy; `long`, as `kernel`.
"""

from __future__ import annotations

import ctypes
import sys

import torch
import torch.distributed as dist

FAULT_STEP = 30
CYCLES_PER_SEC = 1_700_000_000


def keep_busy(seconds: int) -> None:
    """Enqueues a kernel of so many seconds on the current stream."""
    driver = ctypes.CDLL("libcuda.so.1")
    stream = torch.cuda.current_stream().cuda_stream
    try:
        launch = driver.fake_cuda_launch
    except AttributeError:  # a real device
        torch.cuda._sleep(seconds * CYCLES_PER_SEC)
        return
    sleep = ctypes.cast(ctypes.CDLL(None).sleep, ctypes.c_void_p)
    assert launch(ctypes.c_void_p(stream), sleep, ctypes.c_void_p(seconds)) == 0


def main() -> None:
    what, seconds, steps = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    dist.init_process_group(backend="reft")
    rank = dist.get_rank()
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    pair = dist.new_group([1, 2])
    aside = torch.cuda.Stream()
    model = torch.nn.Linear(32, 32).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for step in range(steps):
        optimizer.zero_grad()
        loss = model(torch.ones(4, 32, device=device)).square().mean()
        loss.backward()
        if step == FAULT_STEP and rank == 1 and what in ("kernel", "long"):
            keep_busy(seconds)
        if step == FAULT_STEP and rank == 1 and what == "event":
            with torch.cuda.stream(aside):
                keep_busy(seconds)
            torch.cuda.current_stream().wait_stream(aside)
        if step == FAULT_STEP and rank == 2 and what == "inner":
            keep_busy(seconds)
        if rank in (1, 2) and what == "inner":
            dist.all_reduce(model.bias.grad, group=pair)
        dist.all_reduce(model.weight.grad)  # the op of all ranks
        optimizer.step()
        if rank == 0:
            print(f"step {step} loss {loss.item()}", flush=True)
        else:
            loss.item()
    print(f"rank {rank} trained to the end", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
