"""A training job that one rank ends in a way of its own, for the crash campaign.

    crash_worker.py --death NAME --ranks R [R …] --at STEP --out DIR [--mask]

The named ranks train as the others until step STEP; then they do what `death_NAME` says. A death
writes `here.rR` first, with the line that a verdict should name (0: none). `--mask`: the other ranks
turn an error of a collective into one of their own, as scripts do that catch everything.

Nothing of reft is in it but the backend's name.
"""

from __future__ import annotations

import argparse
import ctypes
import faulthandler
import inspect
import json
import mmap
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset


class Strange(Exception):
    """An exception of the script's own."""


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")


class Job:
    def __init__(self, args: argparse.Namespace) -> None:
        self.rank, self.at, self.out = dist.get_rank(), args.at, Path(args.out)
        self.dies = self.rank in args.ranks
        self.death = args.death
        self.step = 0

    @property
    def due(self) -> bool:
        return self.dies and self.step == self.at

    def here(self, lines: int = 1) -> None:
        """The death is `lines` lines below the caller's; 0: at no line of the script."""
        frame = inspect.currentframe()
        assert frame is not None and frame.f_back is not None
        line = frame.f_back.f_lineno + lines if lines else 0
        (self.out / f"here.r{self.rank}").write_text(json.dumps({"line": line, "ns": time.monotonic_ns()}))


job: Job


class Numbers(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        if job.dies and job.death.startswith("data_") and index == 8 * job.at:
            DEATHS_OF_DATA[job.death]()
        return torch.full((8,), float(index))


def data_exception() -> None:
    job.here()
    raise ValueError("a bad sample")


def data_worker_exception() -> None:
    job.here()
    raise KeyError("a bad sample in a worker")


def data_worker_killed() -> None:
    job.here(0)
    os.kill(os.getpid(), signal.SIGKILL)


def data_worker_leaves() -> None:
    job.here(0)
    os._exit(3)


DEATHS_OF_DATA = {name: globals()[name] for name in list(globals()) if name.startswith("data_")}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if job.due and job.death == "forward":
            job.here()
            raise ValueError("in forward")
        if job.due and job.death == "shapes":
            job.here()
            x = x @ torch.ones(3, 3)
        return self.second(torch.relu(self.first(x)))


# --- deaths between two steps


def death_value() -> None:
    job.here()
    raise ValueError("a bad value\nin two lines")


def death_key() -> None:
    job.here()
    _ = {}["missing"]  # type: ignore[var-annotated]


def death_zero() -> None:
    job.here()
    _ = 1 // 0


def death_assertion() -> None:
    job.here()
    assert job.step < 0, "the loss is not a number"


def death_own_class() -> None:
    job.here()
    raise Strange("of its own")


def death_without_text() -> None:
    job.here()
    raise Unspeakable


def death_from_another() -> None:
    try:
        raise OSError(28, "No space left on device")
    except OSError as error:
        job.here()
        raise RuntimeError("cannot save") from error


def death_group_of_exceptions() -> None:
    job.here()
    raise ExceptionGroup("several", [ValueError("one"), KeyError("two")])


def death_recursion() -> None:
    job.here(0)

    def again() -> None:
        again()

    again()


def death_import() -> None:
    job.here()
    import a_module_that_is_not_there  # noqa: F401  # type: ignore[import-not-found]


def death_disk_full() -> None:
    with open("/dev/full", "wb", buffering=0) as full:
        job.here()
        full.write(b"x")


def death_no_file() -> None:
    job.here()
    Path("/no/such/file").read_text()


def death_disk_error() -> None:
    job.here()
    raise OSError(5, "Input/output error")


def death_memory() -> None:
    job.here()
    bytearray(1 << 60)


def death_tensor_memory() -> None:
    job.here()
    torch.empty(1 << 60)


def death_device_assert() -> None:
    job.here()
    raise RuntimeError("CUDA error: device-side assert triggered")


def death_device_ecc() -> None:
    job.here()
    raise RuntimeError("CUDA error: uncorrectable ECC error encountered")


def death_device_memory() -> None:
    job.here()
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def death_child_program() -> None:
    job.here()
    subprocess.run([sys.executable, "-c", "raise SystemExit(4)"], check=True)


def death_exit_code() -> None:
    job.here(0)
    sys.exit(3)


def death_exit_text() -> None:
    job.here(0)
    sys.exit("nothing to do here")


def death_os_exit() -> None:
    job.here(0)
    os._exit(7)


def death_exit_after_catching() -> None:
    job.here(0)
    try:
        raise ValueError("caught")
    except ValueError:
        sys.exit(9)


def death_leaves_early() -> None:
    job.here(0)
    sys.exit(0)


def death_segv() -> None:
    job.here()
    ctypes.string_at(0)


def death_segv_in_thread() -> None:
    job.here(0)
    thread = threading.Thread(target=lambda: ctypes.string_at(0))
    thread.start()
    thread.join()


def death_segv_sent() -> None:
    job.here()
    os.kill(os.getpid(), signal.SIGSEGV)


def death_segv_under_faulthandler() -> None:
    faulthandler.enable(os.open(os.devnull, os.O_WRONLY))
    job.here()
    ctypes.string_at(0)


def death_stack_overflow() -> None:
    job.here(0)
    kind = ctypes.CFUNCTYPE(None)
    sys.setrecursionlimit(1 << 30)

    def again() -> None:
        callback()

    callback = kind(again)
    callback()


def death_abort() -> None:
    job.here()
    os.abort()


def death_bus() -> None:
    with tempfile.TemporaryFile() as file:
        file.truncate(8192)
        mapped = mmap.mmap(file.fileno(), 8192)
        file.truncate(0)
        job.here()
        _ = mapped[0]


def death_fpe() -> None:
    job.here()
    os.kill(os.getpid(), signal.SIGFPE)


def death_ill() -> None:
    job.here()
    os.kill(os.getpid(), signal.SIGILL)


def death_killed() -> None:
    job.here(0)
    os.kill(os.getpid(), signal.SIGKILL)


def death_killed_in_thread() -> None:
    job.here(0)
    threading.Timer(0.05, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
    time.sleep(60)


def death_terminated() -> None:
    job.here(0)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(60)


def death_user_signal() -> None:
    job.here(0)
    os.kill(os.getpid(), signal.SIGUSR2)
    time.sleep(60)


def death_oom() -> None:
    job.here(0)
    hoard = []
    while True:
        hoard.append(bytearray(os.urandom(1 << 20)) * 32)


def death_thread_then_main() -> None:
    thread = threading.Thread(target=lambda: 1 // 0, name="feeder")
    thread.start()
    thread.join()
    job.here()
    raise RuntimeError("the feeder is gone")


def death_thread_then_exit() -> None:
    thread = threading.Thread(target=lambda: 1 // 0, name="feeder")
    thread.start()
    thread.join()
    job.here(0)
    os._exit(1)


def death_slow_end() -> None:
    """The process needs seconds to end, and the others fail meanwhile."""
    threading.Thread(target=lambda: time.sleep(3)).start()
    job.here()
    raise ValueError("before a slow end")


def death_own_hook() -> None:
    sys.excepthook = lambda *_: print("an error", file=sys.stderr)
    job.here()
    raise ValueError("under a hook of the script")


def death_before_training() -> None:
    job.here()
    raise ValueError("before the first step")


def death_after_training() -> None:
    job.here()
    raise ValueError("after the last step")


DEATHS: dict[str, Callable[[], None]] = {
    name.removeprefix("death_"): function for name, function in list(globals().items()) if name.startswith("death_")
}
IN_TRAINING = ["forward", "shapes", "backward", "step_hook", "module_hook", "comm_hook", *DEATHS_OF_DATA]


def _hooks(model: DistributedDataParallel, optimizer: torch.optim.Optimizer) -> None:
    def backward(grad: torch.Tensor) -> torch.Tensor:
        if job.due and job.death == "backward":
            job.here()
            raise ValueError("in backward")
        return grad

    def stepped(*_: Any) -> None:
        if job.due and job.death == "step_hook":
            job.here()
            raise ValueError("in a hook of the optimizer")

    def entered(*_: Any) -> None:
        if job.due and job.death == "module_hook":
            job.here()
            raise ValueError("in a hook of a module")

    model.module.first.weight.register_hook(backward)
    optimizer.register_step_post_hook(stepped)
    model.module.second.register_forward_pre_hook(entered)
    if job.death == "comm_hook":

        def communicate(group, bucket):  # type: ignore[no-untyped-def]  # torch compares annotations
            if job.due:
                job.here()
                raise ValueError("in a hook of the communication")
            work = dist.all_reduce(bucket.buffer(), async_op=True)
            return work.get_future().then(lambda done: done.value()[0] / dist.get_world_size())

        model.register_comm_hook(None, communicate)


def _train(args: argparse.Namespace) -> None:
    torch.manual_seed(0)
    model = DistributedDataParallel(Model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    _hooks(model, optimizer)
    if job.dies and args.death == "before_training":
        DEATHS[args.death]()
    workers = 1 if args.death.startswith("data_worker") else 0
    for batch in DataLoader(Numbers(), batch_size=8, num_workers=workers):
        optimizer.zero_grad()
        model(batch).sum().backward()
        optimizer.step()
        job.step += 1
        if job.due and args.death in DEATHS and args.death not in ("before_training", "after_training"):
            DEATHS[args.death]()
    if job.dies and args.death == "after_training":
        DEATHS[args.death]()
    dist.barrier()


def main() -> None:
    global job
    parser = argparse.ArgumentParser()
    parser.add_argument("--death", required=True)
    parser.add_argument("--ranks", type=int, nargs="+", required=True)
    parser.add_argument("--at", type=int, required=True)
    parser.add_argument("--out", required=True)
    parser.add_argument("--mask", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.death == "oom" and int(os.environ["RANK"]) in args.ranks:
        Path(os.environ["CRASH_CGROUP"]).write_text(str(os.getpid()))
    dist.init_process_group(backend="reft")
    job = Job(args)
    try:
        _train(args)
    except RuntimeError:
        if args.mask and not job.dies:
            raise Strange("training failed") from None
        raise
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
