"""Trains small models with every kind of parallelism that torch has, and tells the losses, bit for
bit.

Ranks are forked from one process that has imported torch, and run one case after the other in one
process group. A case that fails or hangs costs its group: the next cases get a new one.

    python parallelism_worker.py --backend gloo --results FILE [case …]

writes JSON {case: {"values": [rank 0's, …], "error": "", "seconds": s}}. `values` are floats as
hex, or digests.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import json
import multiprocessing
import multiprocessing.connection
import os
import shutil
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage, schedules
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

WORLD = 4
STEPS = 12
WIDTH = 16
CASES: dict[str, Callable[[int], list[str]]] = {}

Case = Callable[[int], list[str]]


def case(function: Case) -> Case:
    """Adds a case: it gets the rank and returns what every backend must compute alike on that rank."""
    CASES[function.__name__] = function
    return function


def digest(*tensors: torch.Tensor) -> str:
    """Short hash of the bytes of tensors of any shape and dtype."""
    sha = hashlib.sha256()
    for tensor in tensors:
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        sha.update(whole.detach().contiguous().view(torch.uint8).numpy().tobytes() if whole.numel() else b"")
    return sha.hexdigest()[:16]


def exact(loss: torch.Tensor) -> str:
    return float(loss).hex()


class Feed(nn.Module):
    """A residual feed-forward block over (batch, WIDTH)."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def net(blocks: int = 4) -> nn.Sequential:
    torch.manual_seed(7)
    return nn.Sequential(*(Feed() for _ in range(blocks)))


def batch(step: int, rank: int, size: int = 8) -> torch.Tensor:
    """float32 (size, WIDTH), another one for every step and data-parallel rank."""
    return torch.randn(size, WIDTH, generator=torch.Generator().manual_seed(1000 * step + rank))


def square(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(output, target)


def train(model: nn.Module, data_rank: int, optimizer: Any = None, clip: bool = True) -> list[str]:
    """STEPS steps of regression of the input's tanh; losses and a digest of the weights."""
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(STEPS):
        x = batch(step, data_rank)
        loss = square(model(x), x.tanh())
        loss.backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(exact(loss))
    return [*losses, digest(*model.parameters())]


# Data parallel
# --------------------------------------------------------------------------------------------------------


@case
def ddp(rank: int) -> list[str]:
    model = nn.Sequential(net(), nn.BatchNorm1d(WIDTH))
    return train(DistributedDataParallel(model, bucket_cap_mb=0.01), rank)


@case
def ddp_accumulated(rank: int) -> list[str]:
    model = DistributedDataParallel(net(), find_unused_parameters=True, gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for step in range(STEPS):
        with model.no_sync():
            x = batch(step, rank)
            square(model(x), x.tanh()).backward()
        x = batch(step + STEPS, rank)
        loss = square(model(x), x.tanh())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(exact(loss))
    return losses


@case
def ddp_comm_hooks(rank: int) -> list[str]:
    values = []
    for hook in (default_hooks.allreduce_hook, default_hooks.fp16_compress_hook, default_hooks.bf16_compress_hook):
        model = DistributedDataParallel(net(), bucket_cap_mb=0.01)
        model.register_comm_hook(None, hook)
        values += train(model, rank)
    return values


@case
def sync_batch_norm_statistics(rank: int) -> list[str]:
    """What SyncBatchNorm does, by hand: torch's needs an accelerator."""
    mean, squares = torch.zeros(WIDTH), torch.zeros(WIDTH)
    for step in range(STEPS):
        x = batch(step, rank)
        packed = torch.stack([x.mean(0), x.square().mean(0)])
        dist.all_reduce(packed)
        mean, squares = 0.9 * mean + 0.1 * packed[0], 0.9 * squares + 0.1 * packed[1]
    return [digest(mean, squares)]


@case
def zero_redundancy_optimizer(rank: int) -> list[str]:
    model = DistributedDataParallel(net())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-2)
    values = train(model, rank, optimizer)
    optimizer.consolidate_state_dict(to=0)
    if rank == 0:
        state = optimizer.state_dict()["state"]
        values.append(digest(*(state[index]["exp_avg"] for index in sorted(state))))
    return values


# Sharded
# --------------------------------------------------------------------------------------------------------------


@case
def fsdp1(rank: int) -> list[str]:
    return train(FullyShardedDataParallel(net(), device_id=torch.device("cpu"), use_orig_params=True), rank)


@case
def fsdp2(rank: int) -> list[str]:
    model = net()
    for block in model:
        fully_shard(block)
    return train(fully_shard(model), rank)


@case
def fsdp2_mixed_precision(rank: int) -> list[str]:
    model = net()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32)
    for block in model:
        fully_shard(block, mp_policy=policy, reshard_after_forward=False)
    return train(fully_shard(model, mp_policy=policy), rank)


@case
def hsdp(rank: int) -> list[str]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = net()
    for block in model:
        fully_shard(block, mesh=mesh)
    return train(fully_shard(model, mesh=mesh), rank)


# Tensor parallel
# ------------------------------------------------------------------------------------------------------


@case
def tensor_parallel(rank: int) -> list[str]:
    mesh = init_device_mesh("cpu", (WORLD,))
    model = net()
    for block in model:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return train(model, 0, clip=False)


@case
def sequence_parallel(rank: int) -> list[str]:
    mesh = init_device_mesh("cpu", (WORLD,))
    model = net()
    for block in model:
        plan = {
            "norm": SequenceParallel(sequence_dim=0, use_local_output=True),
            "up": ColwiseParallel(input_layouts=Shard(0)),
            "down": RowwiseParallel(output_layouts=Shard(0)),
        }
        parallelize_module(block, mesh, plan)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(STEPS):
        x = batch(step, 0).chunk(WORLD)[rank]
        loss = square(model(x), x.tanh())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(exact(loss))
    return losses


@case
def fsdp2_with_tensor_parallel(rank: int) -> list[str]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    model = net()
    for block in model:
        parallelize_module(block, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(block, mesh=mesh["data"])
    fully_shard(model, mesh=mesh["data"])
    return train(model, mesh["data"].get_local_rank(), clip=False)


# Pipelines
# ------------------------------------------------------------------------------------------------------------


def pipeline(rank: int, name: str, per_rank: int, v_shape: bool = False) -> list[str]:
    """A pipeline over all ranks; losses on the last stage's rank, digests of the weights everywhere."""
    count = WORLD * per_rank
    parts = net(count)
    if v_shape:
        mine = [rank, count - 1 - rank]
    else:
        mine = list(range(rank, count, WORLD))
    modules = nn.ModuleList(copy.deepcopy(parts[stage]) for stage in mine)
    stages: list[Any] = [
        PipelineStage(module, stage, count, torch.device("cpu")) for stage, module in zip(mine, modules, strict=True)
    ]
    make = getattr(schedules, f"Schedule{name}")
    schedule = make(stages if per_rank > 1 else stages[0], 8, loss_fn=square)
    optimizer = torch.optim.AdamW(modules.parameters(), lr=1e-2)
    values = []
    for step in range(STEPS):
        x = batch(step, 0)
        losses: list[torch.Tensor] = []
        inputs = (x,) if 0 in mine else ()
        if count - 1 in mine:
            schedule.step(*inputs, target=x.tanh(), losses=losses)
            values.append(exact(torch.stack(losses).mean()))
        else:
            schedule.step(*inputs)
        optimizer.step()
        optimizer.zero_grad()
    return [*values, digest(*modules.parameters())]


@case
def pipeline_gpipe(rank: int) -> list[str]:
    return pipeline(rank, "GPipe", 1)


@case
def pipeline_1f1b(rank: int) -> list[str]:
    return pipeline(rank, "1F1B", 1)


@case
def pipeline_interleaved_1f1b(rank: int) -> list[str]:
    return pipeline(rank, "Interleaved1F1B", 2)


@case
def pipeline_looped_bfs(rank: int) -> list[str]:
    return pipeline(rank, "LoopedBFS", 2)


@case
def pipeline_interleaved_zero_bubble(rank: int) -> list[str]:
    return pipeline(rank, "InterleavedZeroBubble", 2)


@case
def pipeline_zbv_zero_bubble(rank: int) -> list[str]:
    return pipeline(rank, "ZBVZeroBubble", 2, v_shape=True)


@case
def pipeline_with_data_parallel(rank: int) -> list[str]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "pipeline"))
    stage_index = mesh["pipeline"].get_local_rank()
    data_rank = mesh["data"].get_local_rank()
    parts = net(2)
    module = DistributedDataParallel(parts[stage_index], process_group=mesh.get_group("data"))
    stage = PipelineStage(module, stage_index, 2, torch.device("cpu"), group=mesh.get_group("pipeline"))
    schedule = schedules.Schedule1F1B(stage, 4, loss_fn=square)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    values = []
    for step in range(STEPS):
        x = batch(step, data_rank)
        losses: list[torch.Tensor] = []
        if stage_index == 0:
            schedule.step(x)
        else:
            schedule.step(target=x.tanh(), losses=losses)
            values.append(exact(torch.stack(losses).mean()))
        optimizer.step()
        optimizer.zero_grad()
    return [*values, digest(*module.parameters())]


# Meshes and groups
# ----------------------------------------------------------------------------------------------------


@case
def device_mesh(rank: int) -> list[str]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "columns"))
    whole = torch.arange(64, dtype=torch.float32).view(8, 8)
    values = []
    for placements in ([Shard(0), Shard(1)], [Replicate(), Shard(0)], [Shard(1), Replicate()], [Shard(0), Shard(0)]):
        tensor = distribute_tensor(whole, mesh, placements)
        values.append(digest(tensor.to_local()))
        for target in ([Replicate(), Replicate()], [Shard(1), Shard(0)], [Shard(0), Replicate()]):
            values.append(digest(tensor.redistribute(placements=target).to_local()))
        values.append(digest((tensor @ tensor.t()).full_tensor()))
    flat = mesh["rows", "columns"]._flatten("all")
    total = torch.full((3,), float(rank))
    dist.all_reduce(total, group=flat.get_group())
    partial = DTensor.from_local(whole + rank, flat, [Partial()])
    return [*values, digest(total), digest(partial.full_tensor()), str(mesh.get_coordinate())]


@case
def groups(rank: int) -> list[str]:
    values = []
    for members in ([0, 1], [2, 3], [0, 3], [1, 2, 3], [2]):
        group = dist.new_group(members)
        if rank in members:
            tensor = torch.full((5,), rank + 1.0)
            dist.all_reduce(tensor, group=group)
            values.append(digest(tensor))
            values.append(str(dist.get_process_group_ranks(group)))
            values.append(str(dist.get_group_rank(group, rank)))
            dist.broadcast(tensor, src=members[-1], group=group)
            dist.barrier(group=group)
            dist.destroy_process_group(group)
    mine, _ = dist.new_subgroups(2)
    tensor = torch.full((5,), rank + 1.0)
    dist.all_reduce(tensor, group=mine)
    return [*values, digest(tensor)]


# Collectives
# ----------------------------------------------------------------------------------------------------------


@case
def object_collectives(rank: int) -> list[str]:
    mine = {"rank": rank, "text": "x" * (10 * rank + 1), "tensor": [rank] * 3}
    gathered: list[Any] = [None] * WORLD
    dist.all_gather_object(gathered, mine)
    at_two: list[Any] | None = [None] * WORLD if rank == 2 else None
    dist.gather_object(mine, at_two, dst=2)
    sent = [{"from": 1}, "second", None] if rank == 1 else [None] * 3
    dist.broadcast_object_list(sent, src=1)
    received: list[Any] = [None]
    dist.scatter_object_list(received, [f"for {r}" for r in range(WORLD)] if rank == 0 else None, src=0)
    passed: list[Any] = [f"hello from {rank}"]
    if rank % 2 == 0:
        dist.send_object_list(passed, dst=rank + 1)
    else:
        dist.recv_object_list(passed, src=rank - 1)
    return [json.dumps([gathered, at_two, sent, received, passed])]


@case
def async_collectives(rank: int) -> list[str]:
    x = [torch.randn(33, generator=torch.Generator().manual_seed(100 * rank + i)) for i in range(12)]
    parts = [torch.empty(33) for _ in range(WORLD)]
    gathered = torch.empty(4 * 33)
    scattered = torch.empty(8)
    exchanged = torch.empty(32)
    works = [
        dist.all_reduce(x[0], async_op=True),
        dist.all_reduce(x[1], op=dist.ReduceOp.MAX, async_op=True),
        dist.broadcast(x[2], src=3, async_op=True),
        dist.all_gather(parts, x[3], async_op=True),
        dist.all_gather_into_tensor(gathered, x[4], async_op=True),
        dist.reduce(x[5], dst=1, async_op=True),
        dist.reduce_scatter_tensor(scattered, x[6][:32].contiguous(), async_op=True),
        dist.all_to_all_single(exchanged, x[7][:32].contiguous(), async_op=True),
        dist.barrier(async_op=True),
    ]
    for work in reversed(works):
        work.wait()
    completed = str([work.is_completed() for work in works])
    future = dist.all_reduce(x[8], async_op=True).get_future()
    halved = future.then(lambda done: done.value()[0] / 2).wait()
    rows = [torch.empty(33) for _ in range(WORLD)] if rank == 0 else None
    dist.gather(x[9], rows, dst=0)
    piece = torch.empty(33)
    dist.scatter(piece, [x[10] + r for r in range(WORLD)] if rank == 2 else None, src=2)
    whole = [x[0], x[1], x[2], gathered, scattered, exchanged, halved, piece, *parts, *(rows or [])]
    return [digest(*whole), digest(x[5]) if rank == 1 else "", completed]


@case
def point_to_point(rank: int) -> list[str]:
    mine = torch.arange(1000, dtype=torch.float32) * (rank + 1)
    left, right = (rank - 1) % WORLD, (rank + 1) % WORLD
    got = [torch.empty(1000) for _ in range(4)]
    requests = [dist.isend(mine, right, tag=5), dist.irecv(got[0], left, tag=5)]
    for request in requests:
        request.wait()
    operations = [
        dist.P2POp(dist.isend, mine + 1, right),
        dist.P2POp(dist.irecv, got[1], left),
        dist.P2POp(dist.isend, mine + 2, left),
        dist.P2POp(dist.irecv, got[2], right),
    ]
    for request in dist.batch_isend_irecv(operations):
        request.wait()
    sources = []
    if rank == 0:
        for _ in range(WORLD - 1):
            sources.append(dist.recv(got[3]))
    else:
        dist.send(mine, dst=0)
    return [digest(*got[:3]), str(sorted(sources))]


@case
def dtypes_and_operations(rank: int) -> list[str]:
    values = []
    for dtype in (torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8):
        for operation in (dist.ReduceOp.SUM, dist.ReduceOp.MIN, dist.ReduceOp.MAX, dist.ReduceOp.PRODUCT):
            tensor = torch.arange(1, 9).to(dtype) + rank
            dist.all_reduce(tensor, op=operation)
            values.append(digest(tensor))
    average = torch.arange(8.0) * rank
    dist.all_reduce(average, op=dist.ReduceOp.AVG)
    flags = torch.tensor([rank % 2 == 0, rank == 3])
    dist.broadcast(flags, src=3)
    empty = torch.empty(0)
    dist.all_reduce(empty)
    strided = torch.arange(16.0).view(4, 4).t() + rank
    dist.broadcast(strided, src=1)
    return [*values, digest(average), digest(flags), digest(strided)]


@case
def functional_collectives(rank: int) -> list[str]:
    group = dist.group.WORLD
    assert group is not None
    x = torch.randn(16, generator=torch.Generator().manual_seed(rank), requires_grad=True)
    values = []
    for _ in range(STEPS):
        y = functional.all_reduce(x.detach(), "sum", group)
        z = functional.all_gather_tensor(x.detach(), 0, group)
        w = functional.reduce_scatter_tensor(z.clone(), "sum", 0, group)
        routed = functional.all_to_all_single_autograd(x * 2, [4] * WORLD, [4] * WORLD, group)
        loss = routed.square().sum()
        loss.backward()
        assert x.grad is not None
        values.append(digest(y.clone(), z.clone(), w.clone(), x.grad))
        with torch.no_grad():
            x -= 0.01 * x.grad
        x.grad = None
    return values


# Ranks that part: the last case, as ranks that do not count the same steps wait for commits in vain.
# ----------------------------------------------------------------------------------------------------


@case
def ddp_uneven_inputs(rank: int) -> list[str]:
    model = DistributedDataParallel(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    with Join([model]):
        for step in range(STEPS + rank):
            x = batch(step, rank)
            loss = square(model(x), x.tanh())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(exact(loss))
    return losses


# Running
# --------------------------------------------------------------------------------------------------------------


def run_rank(rank: int, backend: str, store: str, names: list[str], pipe: Any) -> None:
    """One rank: runs the cases and sends (case, rank, values, error) for each."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(WORLD), LOCAL_WORLD_SIZE=str(WORLD))
    torch.set_num_threads(1)
    name = names[0]
    try:
        dist.init_process_group(
            backend, init_method=f"file://{store}", rank=rank, world_size=WORLD, timeout=timedelta(seconds=60)
        )
        for name in names:
            torch.manual_seed(rank)
            values = CASES[name](rank)
            dist.barrier()
            pipe.send((name, rank, values, ""))
        dist.destroy_process_group()
    except BaseException:
        pipe.send((name, rank, [], traceback.format_exc()))
    pipe.close()


def run_group(backend: str, names: list[str], timeout_sec: float, scratch: Path) -> dict[str, dict[str, Any]]:
    """Runs cases in one process group until one fails; returns the results of those that ended."""
    context = multiprocessing.get_context("fork")
    store = tempfile.mktemp(dir=scratch)
    os.environ["REFT_JOB_ID"] = Path(store).name
    pipes: list[Any] = []
    processes: list[Any] = []
    for rank in range(WORLD):
        receive, send = context.Pipe(duplex=False)
        process = context.Process(target=run_rank, args=(rank, backend, store, names, send))
        process.start()
        send.close()
        pipes.append(receive)
        processes.append(process)

    results: dict[str, dict[str, Any]] = {}
    pending = dict.fromkeys(range(WORLD))
    open_pipes = list(pipes)
    values: dict[str, dict[int, list[str]]] = {}
    error = ""
    begin = time.monotonic()
    deadline = begin + timeout_sec
    while open_pipes and not (error and time.monotonic() > deadline):
        ready: Any = multiprocessing.connection.wait(open_pipes, timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            error = error or f"no end within {timeout_sec} s"
            break
        for pipe in ready:
            try:
                name, rank, got, trouble = pipe.recv()
            except EOFError:
                open_pipes.remove(pipe)
                continue
            if trouble:
                error = error or f"rank {rank}: {trouble}"
                deadline = min(deadline, time.monotonic() + 3)  # what the others say comes of this
                continue
            values.setdefault(name, {})[rank] = got
            if len(values[name]) == WORLD:
                now = time.monotonic()
                results[name] = {
                    "values": [values[name][rank] for rank in pending],
                    "error": "",
                    "seconds": round(now - begin, 2),
                }
                begin, deadline = now, now + timeout_sec
    for process in processes:
        process.join(0.1 if error else 20)
        if process.exitcode is None:
            process.kill()
            process.join()
            error = error or "a rank did not end"
        elif process.exitcode != 0:
            error = error or f"a rank ended with {process.exitcode}"
    left = [name for name in names if name not in results]
    if left:
        results[left[0]] = {"values": [], "error": error or "the ranks ended early", "seconds": 0.0}
    elif error:
        results[names[-1]]["error"] = f"at the end of the process group: {error}"
    return results


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--backend", action="append", required=True, help="may be given more than once")
    options.add_argument("--results", required=True)
    options.add_argument("--timeout-sec", type=float, default=60, help="for one case")
    options.add_argument("cases", nargs="*")
    args = options.parse_args()
    names = args.cases or list(CASES)
    torch.set_num_threads(1)

    scratch = Path(tempfile.mkdtemp(prefix="pm"))  # short: sockets live below it
    os.environ.update(REFT_RUN_DIR=str(scratch / "r"), REFT_AGENT_LINGER_SEC="0", REFT_RESUME="off", REFT_BANNER="0")
    outcomes: dict[str, dict[str, Any]] = {}
    try:
        for backend in args.backend:
            results: dict[str, Any] = {}
            while left := [name for name in names if name not in results]:
                results |= run_group(backend, left, args.timeout_sec, scratch)
            outcomes[backend] = results
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    Path(args.results).write_text(json.dumps(outcomes), encoding="ascii")


if __name__ == "__main__":
    main()
