"""A training job with one fault, for the hang campaign: what a job does when it hangs, or when it
only looks like that.

    hang_worker.py --layout ddp|plain|tpdp|pipe|pipedp --fault NAME --rank R --at STEP --out DIR
    [--sec S] [--hold]

Rank R trains as the others until step STEP, writes `injected.rR` with the monotonic time, and does
what `--fault` says: a function `fault_NAME` (instead of going on), `ops_NAME` (wrong use of
collectives; all ranks run it, R is the one that errs) or `busy_NAME` (healthy, but slow for
`--sec`). `--hold`: a rank whose collective fails stays, as jobs do whose clean-up hangs.

Nothing of reft is in it but the backend's name.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import ctypes
import faulthandler
import gc
import mmap
import multiprocessing
import os
import pdb
import queue
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

from tests.fault import hang_peers

LONG = 3600.0
LARGE = 1 << 20  # elements: more than a socket takes unread


class Abandoned(Exception):
    """A rank leaves the training loop, although the others go on."""


class Job:
    """What a rank knows of itself and of its job."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.out = Path(args.out)
        self.chosen = self.rank == args.rank
        self.busy_sec = float(args.sec)
        self.beside: hang_peers.InRank | None = None
        self.leaves_a_send_out = False  # a stage of a pipeline, in this step

    def injected(self) -> None:
        """Says that the fault begins now."""
        if self.args.stop_launcher:
            os.kill(os.getppid(), signal.SIGSTOP)  # from here, or it might end the job before anybody outside could
        part = self.out / f".injected.r{self.rank}"
        part.write_text(repr(time.monotonic()))
        part.rename(self.out / f"injected.r{self.rank}")

    def reached(self, name: str) -> None:
        (self.out / f"{name}.r{self.rank}").touch()


# --- layouts: one training step each
# ---------------------------------------------------------------------------------


class Layout:
    def __init__(self, job: Job) -> None:
        self.job = job

    def step(self, number: int, middle: Callable[[], None]) -> None:
        """One step; `middle` runs between its first and its last op."""
        raise NotImplementedError


class Plain(Layout):
    """Gradients summed by hand."""

    def step(self, number: int, middle: Callable[[], None]) -> None:
        dist.all_reduce(torch.ones(64))
        middle()
        dist.all_reduce(torch.ones(16))


class Ddp(Layout):
    """DistributedDataParallel with several buckets: its ops are waited for through their futures."""

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        body = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4)))
        self.model = DistributedDataParallel(body, bucket_cap_mb=0.3)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)

    def step(self, number: int, middle: Callable[[], None]) -> None:
        self.optimizer.zero_grad()
        loss = self.model(torch.full((4, 256), float(number + self.job.rank))).square().mean()
        middle()
        loss.backward()
        self.optimizer.step()


class TensorData(Layout):
    """Pairs of neighbours share layers, ranks of the same place in their pair share data."""

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        for first in range(0, job.world, 2):
            group = dist.new_group([first, first + 1])
            if job.rank in (first, first + 1):
                self.tensor = group
        for place in range(2):
            group = dist.new_group(list(range(place, job.world, 2)))
            if job.rank % 2 == place:
                self.data = group

    def step(self, number: int, middle: Callable[[], None]) -> None:
        for layer in range(3):
            dist.all_reduce(torch.ones(64), group=self.tensor)
            if layer == 1:
                middle()
        dist.all_reduce(torch.ones(128), group=self.data)


class Pipe(Layout):
    """A pipeline over all ranks: activations forward, gradients back, two micro-batches."""

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self.stage, self.stages = job.rank, job.world
        self.before, self.after = job.rank - 1, job.rank + 1

    def step(self, number: int, middle: Callable[[], None]) -> None:
        for micro in range(2):
            if self.stage > 0:
                dist.recv(torch.empty(256), self.before)
            if micro == 1:
                middle()
            if self.stage < self.stages - 1 and not (micro == 1 and self.job.leaves_a_send_out):
                dist.send(torch.ones(256), self.after)
        for _ in range(2):
            if self.stage < self.stages - 1:
                dist.recv(torch.empty(256), self.after)
            if self.stage > 0:
                dist.send(torch.ones(256), self.before)


class PipeData(Pipe):
    """Pipelines of half the ranks each, whose stages sum gradients with their like."""

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self.stages = job.world // 2
        self.stage = job.rank % self.stages
        for stage in range(self.stages):
            group = dist.new_group([stage, stage + self.stages])
            if self.stage == stage:
                self.data = group

    def step(self, number: int, middle: Callable[[], None]) -> None:
        super().step(number, middle)
        dist.all_reduce(torch.ones(64), group=self.data)


LAYOUTS: dict[str, type[Layout]] = {"plain": Plain, "ddp": Ddp, "tpdp": TensorData, "pipe": Pipe, "pipedp": PipeData}


# --- faults of one rank: never return
# --------------------------------------------------------------------------------


def fault_sleep(job: Job) -> None:
    time.sleep(LONG)


def fault_loop(job: Job) -> None:
    while True:
        pass


def fault_regex(job: Job) -> None:
    re.match("(a+)+$", "a" * 40 + "b")


def fault_gil(job: Job) -> None:
    ctypes.PyDLL(None).sleep(int(LONG))


def hold_gil() -> None:
    ctypes.PyDLL(None).sleep(int(LONG))


def fault_gil_thread(job: Job) -> None:
    threading.Thread(target=hold_gil, daemon=True).start()
    fault_loop(job)


def fault_inversion(job: Job) -> None:
    """A thread has a native lock and wants the GIL; the main thread has the GIL and wants the lock."""
    mutex = ctypes.create_string_buffer(64)
    ctypes.CDLL(None).pthread_mutex_lock(mutex)
    ctypes.PyDLL(None).pthread_mutex_lock(mutex)


def fault_locks(job: Job) -> None:
    first, second = threading.Lock(), threading.Lock()
    both = threading.Barrier(2)

    def other() -> None:
        with second:
            both.wait()
            with first:
                pass

    threading.Thread(target=other, daemon=True).start()
    with first:
        both.wait()
        with second:
            pass


def fault_dead_thread(job: Job) -> None:
    done: queue.Queue[int] = queue.Queue()

    def producer() -> None:
        raise SystemExit  # as one whose exception nobody sees

    threading.Thread(target=producer, daemon=True).start()
    done.get()


def fault_join(job: Job) -> None:
    thread = threading.Thread(target=time.sleep, args=(LONG,), daemon=True)
    thread.start()
    thread.join()


def fault_fifo(job: Job) -> None:
    path = job.out / "fifo"
    os.mkfifo(path)
    os.read(os.open(path, os.O_RDWR), 1)


def fault_socket(job: Job) -> None:
    ours, _theirs = socket.socketpair()
    ours.recv(1)


def fault_uninterruptible(job: Job) -> None:
    """A parent waits uninterruptibly until its vfork child runs; the child opens a FIFO that nobody writes to."""
    path = job.out / "fifo"
    os.mkfifo(path)
    action = [(os.POSIX_SPAWN_OPEN, 0, str(path), os.O_RDONLY, 0)]
    os.posix_spawn("/bin/true", ["true"], {}, file_actions=action)


def fault_child(job: Job) -> None:
    subprocess.run(["sleep", str(LONG)], check=True)


def fault_save(job: Job) -> None:
    """The store of checkpoints takes no more bytes."""
    path = job.out / "checkpoint"
    os.mkfifo(path)
    os.open(path, os.O_RDWR)
    with open(path, "wb", buffering=0) as file:
        torch.save({"weights": torch.ones(LARGE)}, file)


def fault_async_save(job: Job) -> None:
    def write() -> None:
        fault_save(job)

    pool = concurrent.futures.ThreadPoolExecutor(1)
    pool.submit(write).result()


def fault_debugger(job: Job) -> None:
    _master, terminal = os.openpty()
    with open(terminal, "r+b", buffering=0) as raw:
        text = open(raw.fileno(), closefd=False)  # noqa: SIM115
        pdb.Pdb(stdin=text, stdout=sys.stderr).set_trace()
        time.sleep(LONG)


class Items(Dataset[Any]):
    """Items of a data set; the one that is asked for first never comes."""

    def __init__(self, way: str) -> None:
        self.way, self.lock = way, threading.Lock()

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.way == "sleep":
            time.sleep(LONG)
        if self.way == "loop":
            while True:
                pass
        with self.lock:
            return torch.ones(1)


def fault_data_sleep(job: Job) -> None:
    next(iter(DataLoader(Items("sleep"), num_workers=1)))


def fault_data_loop(job: Job) -> None:
    next(iter(DataLoader(Items("loop"), num_workers=1)))


def fault_data_lock(job: Job) -> None:
    """The worker is forked while another thread has the lock."""
    items = Items("lock")
    items.lock.acquire()
    next(iter(DataLoader(items, num_workers=1)))


def fault_data_inline(job: Job) -> None:
    next(iter(DataLoader(Items("sleep"))))


def fault_left(job: Job) -> None:
    raise Abandoned


def fault_shutdown(job: Job) -> None:
    """The script has ended, and a thread that is no daemon keeps the process."""
    threading.Thread(target=time.sleep, args=(LONG,)).start()
    raise Abandoned


def fault_exit(job: Job) -> None:
    os._exit(3)


def fault_raise(job: Job) -> None:
    raise RuntimeError("a fault of the user's code")


def fault_kill(job: Job) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def fault_segv(job: Job) -> None:
    faulthandler.disable()
    os.kill(os.getpid(), signal.SIGSEGV)


def fault_abort(job: Job) -> None:
    os.abort()


def fault_stop(job: Job) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(LONG)


def fault_none(job: Job) -> None:
    """The harness does it, from outside, while the rank goes on."""


# --- wrong use of collectives: all ranks run it at the same step
# --------------------------------------------------------


def ops_extra_barrier(job: Job) -> None:
    if job.chosen:
        dist.barrier()


def ops_extra_reduce(job: Job) -> None:
    if job.chosen:
        dist.all_reduce(torch.ones(7))


def ops_skip(job: Job) -> None:
    if not job.chosen:
        dist.all_reduce(torch.ones(7))


def ops_order(job: Job) -> None:
    ops: list[Callable[[], Any]] = [
        lambda: dist.all_reduce(torch.ones(64)),
        lambda: dist.all_gather([torch.ones(64) for _ in range(job.world)], torch.ones(64)),
    ]
    for op in reversed(ops) if job.chosen else ops:
        op()


def ops_size(job: Job) -> None:
    dist.all_reduce(torch.ones(1000 if job.chosen else 1024))


def ops_dtype(job: Job) -> None:
    """Completes, with wrong values; what hangs is something else."""
    dist.all_reduce(torch.ones(64, dtype=torch.int32 if job.chosen else torch.float32))


def ops_root(job: Job) -> None:
    others = (job.args.rank + 1) % job.world
    dist.broadcast(torch.ones(LARGE), job.rank if job.chosen else others)
    dist.all_reduce(torch.ones(64))


ROUNDS = 8  # of an op of several ranks, the last of which goes wrong: before, it is their habit


def ops_subgroup(job: Job) -> None:
    """One expert has no tokens and leaves the op of its group out."""
    group = dist.new_group(list(range(job.world)))
    for number in range(ROUNDS):
        last = number == ROUNDS - 1
        if last:
            job.injected()
        if not (last and job.chosen):
            dist.all_reduce(torch.ones(8), group=group)
        dist.all_reduce(torch.ones(4))


def ops_two_groups(job: Job) -> None:
    """Two groups with the same ranks, used in another order by one of them."""
    groups = [dist.new_group(list(range(job.world))) for _ in range(2)]
    for number in range(ROUNDS):
        last = number == ROUNDS - 1
        if last:
            job.injected()
        for group in reversed(groups) if last and job.chosen else groups:
            dist.all_reduce(torch.ones(8), group=group)


def ops_ring(job: Job) -> None:
    """Groups of neighbours in a ring, each rank with its own first: all wait for the next."""
    groups = {}
    for first in range(job.world):
        groups[first] = dist.new_group(sorted([first, (first + 1) % job.world]))
    job.injected()
    dist.all_reduce(torch.ones(8), group=groups[job.rank])
    dist.all_reduce(torch.ones(8), group=groups[(job.rank - 1) % job.world])


def partner(job: Job) -> int | None:
    """Neighbours are pairs; only the pair of the chosen rank errs."""
    other = job.args.rank ^ 1
    return other if job.chosen else job.args.rank if job.rank == other else None


def ops_crossed_sends(job: Job) -> None:
    peer = partner(job)
    if peer is not None:
        job.injected()
        dist.send(torch.ones(LARGE), peer)
        dist.recv(torch.ones(LARGE), peer)


def ops_crossed_recvs(job: Job) -> None:
    peer = partner(job)
    if peer is not None:
        job.injected()
        dist.recv(torch.ones(64), peer)
        dist.send(torch.ones(64), peer)


def ops_tag(job: Job) -> None:
    peer = partner(job)
    if peer is not None:
        job.injected()
        if job.chosen:
            dist.send(torch.ones(LARGE), peer, tag=1)
        else:
            dist.recv(torch.ones(LARGE), peer, tag=2)


def ops_one_message_more(job: Job) -> None:
    """A receive for which nobody sends; the sender goes on to the next phase."""
    peer = partner(job)
    for number in range(ROUNDS):
        last = number == ROUNDS - 1
        if last and peer is not None:
            job.injected()
        for _ in range(4 if last and job.chosen else 3):
            if peer is not None and job.chosen:
                dist.recv(torch.ones(64), peer)
            elif peer is not None:
                dist.send(torch.ones(64), peer)
        dist.all_reduce(torch.ones(8))


def ops_swap(job: Job) -> None:
    """Two ranks swap tensors: one sends first, the other receives first, until both receive first."""
    peer = partner(job)
    if peer is None:
        return
    ops: list[Callable[[], Any]] = [
        lambda: dist.send(torch.ones(64), peer),
        lambda: dist.recv(torch.ones(64), peer),
    ]
    for number in range(ROUNDS):
        last = number == ROUNDS - 1
        if last:
            job.injected()
        for op in ops if job.chosen and not last else reversed(ops):
            op()


def ops_stage_leaves_a_send_out(job: Job) -> None:
    job.leaves_a_send_out = job.chosen


def ops_any_source(job: Job) -> None:
    if job.chosen:
        dist.recv(torch.ones(64))  # from anybody: nobody sends


def ops_half(job: Job) -> None:
    """Half of the ranks take the one branch, half the other."""
    if (job.rank < job.world // 2) == (job.args.rank < job.world // 2):
        dist.all_reduce(torch.ones(8))
    else:
        dist.barrier()


def ops_store(job: Job) -> None:
    """A key that the chosen rank should set first; it waits for the others in a collective instead."""
    if not job.chosen:
        store = torch.distributed.distributed_c10d._get_default_store()
        store.wait(["never"], __import__("datetime").timedelta(seconds=LONG))


def ops_uneven_then_sleep(job: Job) -> None:
    """Ops whose sizes rightly differ by rank; then one rank sleeps."""
    for _ in range(4):
        mine = [(rank + job.rank) % 3 + 1 for rank in range(job.world)]
        out = torch.empty(sum((job.rank + rank) % 3 + 1 for rank in range(job.world)))
        dist.all_to_all_single(out, torch.ones(sum(mine)), mine, mine)
        root = [torch.ones(4) for _ in range(job.world)] if job.rank == 0 else None
        dist.scatter(torch.ones(4), root, src=0)
        dist.gather(torch.ones(4), root, dst=0)
        dist.all_reduce(torch.ones(4))
    if job.chosen:
        job.injected()
        time.sleep(LONG)


def ops_object(job: Job) -> None:
    """all_gather_object and broadcasts of objects; then one rank sleeps."""
    for number in range(4):
        everything: list[Any] = [None] * job.world
        dist.all_gather_object(everything, {"rank": job.rank, "n": "x" * number * (job.rank + 1)})
        dist.broadcast_object_list([number], src=0)
    if job.chosen:
        job.injected()
        time.sleep(LONG)


def issue_then_wait(job: Job, rounds: int) -> None:
    """Ops in flight while the rank that issued some of them is elsewhere: only who sleeps is at fault."""
    for number in range(rounds + 1):
        work = dist.all_reduce(torch.ones(64), async_op=True)
        dist.all_reduce(torch.ones(8))
        if number == rounds and job.chosen:
            job.injected()
            time.sleep(LONG)
        works = [work, *(dist.all_reduce(torch.ones(64), async_op=True) for _ in range(3))]
        works[-1].wait()


def ops_async(job: Job) -> None:
    issue_then_wait(job, rounds=4)


def ops_async_first_time(job: Job) -> None:
    """As an evaluation of one rank looks, while the others wait where nobody has waited before."""
    issue_then_wait(job, rounds=0)


# --- healthy, but it looks like a hang for a while
# ------------------------------------------------------------------------


def busy_all_idle(job: Job) -> None:
    """All do nothing until the same moment, so that nobody is late who was stopped for a while."""
    end = torch.tensor([time.monotonic() + job.busy_sec], dtype=torch.float64)
    dist.broadcast(end, 0)
    time.sleep(max(0.0, end.item() - time.monotonic()))


def until(end: float) -> Iterator[int]:
    number = 0
    while time.monotonic() < end:
        yield number
        number += 1


def busy_all_compute(job: Job) -> None:
    total = 0
    for number in until(time.monotonic() + job.busy_sec):
        total += number % 7
    dist.barrier()


def busy_one_compute(job: Job) -> None:
    """An evaluation, an index, a tokenization on one rank."""
    if job.chosen:
        busy_all_compute_alone(job)
    dist.barrier()


def busy_one_compute_known_place(job: Job) -> None:
    """The same at a place where the others have waited often before, but never so long."""
    known_place(job, lambda: busy_all_compute_alone(job))


def busy_all_compute_alone(job: Job) -> None:
    total = 0
    for number in until(time.monotonic() + job.busy_sec):
        total += number % 7


def busy_one_sleep_new_place(job: Job) -> None:
    if job.chosen:
        time.sleep(job.busy_sec)
    dist.barrier()


def write_slowly(job: Job) -> None:
    with tempfile.NamedTemporaryFile(dir=job.out) as file:
        for _ in until(time.monotonic() + job.busy_sec):
            file.write(b"x" * 65536)
            file.flush()
            time.sleep(0.05)


def busy_checkpoint(job: Job) -> None:
    known_place(job, lambda: write_slowly(job))


def busy_load(job: Job) -> None:
    path = job.out / f"state.{job.rank}"
    path.write_bytes(b"x" * (1 << 20))
    for number in range(6):
        if number == 5:
            for _ in until(time.monotonic() + (job.busy_sec if job.chosen else 0.1)):
                path.read_bytes()
                time.sleep(0.05)
        dist.barrier()


def busy_gc(job: Job) -> None:
    """All ranks collect garbage for long, and no other thread of Python runs."""
    rows = [[] for _ in range(100_000)]
    for _ in until(time.monotonic() + job.busy_sec):
        gc.collect()
    del rows


def busy_data_warmup(job: Job) -> None:
    class Cold(Dataset[Any]):
        def __len__(self) -> int:
            return 2

        def __getitem__(self, index: int) -> torch.Tensor:
            time.sleep(job.busy_sec if job.chosen else 0)
            return torch.ones(1)

    next(iter(DataLoader(Cold(), num_workers=1)))
    dist.all_reduce(torch.ones(3))


def busy_new_group(job: Job) -> None:
    """The first use of a group, to which one rank comes late."""
    if job.chosen:
        time.sleep(job.busy_sec)
    group = dist.new_group(list(range(job.world)))
    dist.all_reduce(torch.ones(3), group=group)


def busy_rollouts(job: Job) -> None:
    """Ranks of a group that generates for long, while the trainers go on."""
    half = job.world // 2
    trainers, generators = dist.new_group(list(range(half))), dist.new_group(list(range(half, job.world)))
    end = time.monotonic() + job.busy_sec
    if job.rank < half:
        for _ in range(int(job.busy_sec / 0.02)):
            dist.all_reduce(torch.ones(8), group=trainers)
            time.sleep(0.02)
    else:
        if job.rank == job.world - 1:
            time.sleep(max(0.0, end - time.monotonic()))
        dist.all_reduce(torch.ones(8), group=generators)
    dist.barrier()


def busy_never_again(job: Job) -> None:
    """Ranks that are done with a group, and idle until all meet again; ops are issued early and waited for late."""
    work = dist.all_reduce(torch.ones(8), async_op=True)
    time.sleep(job.busy_sec)
    work.wait()


def busy_steps(job: Job) -> None:
    """Steps that take long on all ranks, one after the other."""
    for _ in range(4):
        time.sleep(job.busy_sec / 4)
        dist.all_reduce(torch.ones(8))


def busy_slow_steps(job: Job) -> None:
    """All steps are slow because of one rank; from the first on."""
    for _ in range(4):
        if job.chosen:
            time.sleep(job.busy_sec / 2)
        dist.all_reduce(torch.ones(5))


def busy_straggler(job: Job) -> None:
    job.reached("straggling")
    for _ in until(time.monotonic() + job.busy_sec):
        time.sleep(0.06 if job.chosen else 0.01)
        dist.all_reduce(torch.ones(8))
        stop = torch.tensor([1.0 if time.monotonic() > job.started + job.busy_sec else 0.0])
        dist.all_reduce(stop)
        if stop.item() > 0:
            break


def busy_jitter(job: Job) -> None:
    """Another rank is slow in each step."""
    job.reached("straggling")
    for number in range(int(job.busy_sec / 0.06)):
        time.sleep(0.06 if (number * 7 + number // 3) % job.world == job.rank else 0.01)
        dist.all_reduce(torch.ones(8))


def busy_teardown(job: Job) -> None:
    """After the end of training: nobody is in an op, one rank uploads, the others are gone."""
    dist.barrier()
    if job.chosen:
        time.sleep(job.busy_sec)
    sys.exit(0)


def busy_compile(job: Job) -> None:
    """One rank compiles, at a place where the others have waited often: the compiler's frames say so."""
    for number in range(6):
        if job.chosen and number == 5:

            def slow_backend(graph: Any, _inputs: Any) -> Any:
                time.sleep(job.busy_sec)
                return graph.forward

            torch.compile(lambda x: x * 2 + 1, backend=slow_backend)(torch.ones(3))
        dist.all_reduce(torch.ones(3))


def busy_mapped(job: Job) -> None:
    """Page faults of a large mapping: neither read nor write calls."""
    with tempfile.TemporaryFile(dir=job.out) as file:
        file.truncate(64 << 20)
        with mmap.mmap(file.fileno(), 0) as mapping:
            for number in until(time.monotonic() + (job.busy_sec if job.chosen else 0)):
                mapping[number * 4096 % (64 << 20)] = number % 255
    dist.all_reduce(torch.ones(3))


# At a place where the others have waited often before, but never so long.


def known_place(job: Job, work: Callable[[], object]) -> None:
    """The chosen rank does `work` before the last of six barriers."""
    for number in range(6):
        if job.chosen and number == 5:
            work()
        dist.barrier()


def repeated(job: Job, once: Callable[[], object]) -> Callable[[], None]:
    """Does `once` again and again for the job's time."""

    def work() -> None:
        for _ in until(time.monotonic() + job.busy_sec):
            once()

    return work


def count_words(text: str) -> int:
    return len(collections.Counter(re.findall(r"\w+", text)))


def spin(sec: float) -> None:
    for _ in until(time.monotonic() + sec):
        pass


def busy_evaluation(job: Job) -> None:
    """An evaluation under `no_grad`, as rank 0 makes every few epochs."""
    model, rows = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)), torch.randn(256, 64)

    def evaluate() -> torch.Tensor:
        with torch.no_grad():
            return model(rows).argmax(1).float().mean()

    known_place(job, repeated(job, evaluate))


def busy_gc_one(job: Job) -> None:
    rows = [[] for _ in range(100_000)]
    known_place(job, repeated(job, gc.collect))
    del rows


def busy_zip(job: Job) -> None:
    """zlib gives the GIL back while it works."""
    known_place(job, repeated(job, lambda: zlib.compress(os.urandom(4 << 20), 9)))


def busy_zip_thread(job: Job) -> None:
    """The main thread waits for a thread of a pool that compresses."""
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        work = repeated(job, lambda: zlib.compress(os.urandom(4 << 20), 9))
        known_place(job, lambda: pool.submit(work).result())


def busy_pool(job: Job) -> None:
    """Tokenization by processes: the rank itself only waits for them."""

    def tokenize() -> None:
        text, end = "to be or not to be " * 20_000, time.monotonic() + job.busy_sec
        with multiprocessing.get_context("fork").Pool(2) as pool:
            while time.monotonic() < end:
                pool.map(count_words, [text] * 64)

    known_place(job, tokenize)


def busy_executor(job: Job) -> None:
    """One long task in a process of `concurrent.futures`."""

    def run() -> None:
        context = multiprocessing.get_context("fork")
        with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as pool:
            pool.submit(spin, job.busy_sec).result()

    known_place(job, run)


def busy_grandchild(job: Job) -> None:
    """A shell that runs a program that works."""
    loop = f"import time; end = time.time() + {job.busy_sec}\nwhile time.time() < end: pass"
    command = f"{shlex.quote(sys.executable)} -c {shlex.quote(loop)}; true"
    known_place(job, lambda: subprocess.run(["sh", "-c", command], check=True))


def busy_data_worker(job: Job) -> None:
    """A data worker that takes long for an item in the midst of an epoch."""

    class Uneven(Dataset[Any]):
        def __len__(self) -> int:
            return 6

        def __getitem__(self, index: int) -> torch.Tensor:
            spin(job.busy_sec if job.chosen and index == 5 else 0)
            return torch.ones(1)

    for _ in DataLoader(Uneven(), num_workers=1, prefetch_factor=2):
        dist.all_reduce(torch.ones(3))


def busy_torch_save(job: Job) -> None:
    """Checkpoints, one after the other, to a disk that takes them."""
    state = {str(i): torch.randn(1 << 20) for i in range(4)}
    known_place(job, repeated(job, lambda: torch.save(state, job.out / "look-alike.pt")))


def busy_copy(job: Job) -> None:
    """The end of a stage copies its files away."""
    (job.out / "from").write_bytes(os.urandom(8 << 20))
    known_place(job, repeated(job, lambda: shutil.copy(job.out / "from", job.out / "to")))


def busy_swap(job: Job) -> None:
    """Pages that come back from a file, as under memory pressure."""
    path = job.out / "pages"
    path.write_bytes(bytes(32 << 20))

    def touch() -> int:
        with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as mapping:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            return sum(mapping[at] for at in range(0, 32 << 20, 4096))

    known_place(job, repeated(job, touch))


# --- the job
# ------------------------------------------------------------------------------------------------------------


def train(job: Job) -> None:
    args = job.args
    layout = LAYOUTS[args.layout](job)
    kind, _, name = args.fault.partition("_")
    fault = globals()[args.fault]
    deep = args.where == "middle"
    if job.beside is not None:
        job.beside.begin(getattr(layout, "model", None))
    for number in range(args.steps):
        now = number == args.at

        def middle(now: bool = now) -> None:
            if now and job.chosen and kind == "fault" and deep:
                job.injected()
                fault(job)

        if now and kind == "fault" and job.chosen and not deep:
            job.injected()
            fault(job)
        if now and kind == "ops":
            if job.chosen and name not in SAY_THEMSELVES:
                job.injected()
            fault(job)
        if now and kind == "busy":
            job.injected()
            fault(job)
        layout.step(number, middle)
        if job.beside is not None:
            job.beside.step()


SAY_THEMSELVES = {
    "subgroup",
    "two_groups",
    "ring",
    "crossed_sends",
    "crossed_recvs",
    "tag",
    "one_message_more",
    "swap",
    "uneven_then_sleep",
    "object",
    "async",
    "async_first_time",
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--layout", choices=list(LAYOUTS), default="plain")
    parser.add_argument("--fault", required=True)
    parser.add_argument("--where", choices=["between", "middle"], default="between")
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--at", type=int, default=8)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--sec", type=float, default=0)
    parser.add_argument("--late", type=int, default=-1, help="rank that comes to init_process_group --sec late")
    parser.add_argument("--hold", action="store_true")
    parser.add_argument("--stop-launcher", action="store_true", help="it notices nothing of the fault")
    parser.add_argument("--beside", type=float, help="other tools watch too; a stall is so many seconds")
    parser.add_argument("--lm", help="site-packages with lm-resiliency")
    parser.add_argument("--out", required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    (Path(args.out) / f"pid.r{os.environ['RANK']}").write_text(str(os.getpid()))
    if os.environ["RANK"] == str(args.late):
        time.sleep(args.sec)
    beside = hang_peers.InRank(Path(args.out), args.lm, args.beside) if args.beside else None
    dist.init_process_group("reft")
    job = Job(args)
    job.beside = beside
    job.started = time.monotonic()
    try:
        train(job)
    except Abandoned:
        if args.fault == "fault_left":
            time.sleep(LONG)  # the next phase: an export, say
        return
    except RuntimeError:
        if not args.hold or (job.chosen and args.fault == "fault_raise"):
            raise
        job.reached("failed")
        signal.pause()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
