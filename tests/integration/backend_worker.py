"""Cases for test_backend_*.py, run under torchrun: ``backend_worker.py CASE``. Prints ``ok RANK`` when the case passed."""

from __future__ import annotations

import os
import signal
import sys
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

NEWER = tuple(int(p) for p in torch.__version__.split(".")[:2]) >= (2, 14)


def records() -> list[dict[str, Any]]:
    from reft import _C

    return [r for r in _C.process_op_log().tail(4000) if r["op"] != "step"]


def all_done() -> list[dict[str, Any]]:
    """The records, once all ops are marked done: by the thread that completes them, which may come after the wait has returned."""
    deadline = time.monotonic() + 10
    while not all(r["done_ns"] for r in records()) and time.monotonic() < deadline:
        time.sleep(0.001)
    assert all(r["done_ns"] for r in records()), [r for r in records() if not r["done_ns"]][:3]
    return records()


def raises(what: type[Exception], call: Callable[[], Any]) -> str:
    try:
        call()
    except what as error:
        return str(error)
    raise AssertionError("nothing was raised")


def collectives(rank: int, size: int) -> None:
    assert dist.get_backend() == "reft"
    group = dist.group.WORLD
    assert type(group) is dist.ProcessGroup
    x = torch.full((3,), float(rank + 1))
    dist.all_reduce(x)
    total = sum(range(1, size + 1))
    assert x.tolist() == [total] * 3
    work = dist.all_reduce(x, async_op=True)
    assert work.wait() and work.is_completed()
    y = torch.full((2,), float(rank))
    dist.broadcast(y, size - 1)
    assert y.tolist() == [size - 1.0] * 2
    out = [torch.zeros(1) for _ in range(size)]
    dist.all_gather(out, torch.full((1,), float(rank)))
    assert [int(t) for t in out] == list(range(size))
    flat = torch.zeros(size)
    dist.all_gather_into_tensor(flat, torch.full((1,), float(rank)))
    assert flat.tolist() == list(map(float, range(size)))
    piece = torch.zeros(1)
    dist.reduce_scatter_tensor(piece, torch.arange(size, dtype=torch.float32))
    assert piece.item() == rank * size
    dist.reduce_scatter(piece, [torch.full((1,), float(i)) for i in range(size)])
    assert piece.item() == rank * size
    dist.gather(torch.full((1,), float(rank)), out if rank == 0 else None)
    dist.scatter(piece, [torch.full((1,), float(i * 2)) for i in range(size)] if rank == 0 else None)
    assert piece.item() == rank * 2
    dist.reduce(torch.ones(1), 0)
    sent = [torch.full((i + 1,), float(rank)) for i in range(size)]
    received = [torch.zeros(rank + 1) for _ in range(size)]
    dist.all_to_all(received, sent)
    assert [t.tolist() for t in received] == [[float(i)] * (rank + 1) for i in range(size)]
    work = dist.all_to_all(received, sent, async_op=True)
    values = work.get_future().wait()
    assert [t.tolist() for t in values] == [[float(i)] * (rank + 1) for i in range(size)]
    turned = torch.zeros(size)
    dist.all_to_all_single(turned, torch.full((size,), float(rank)))
    assert turned.tolist() == list(map(float, range(size)))
    dist.barrier()
    dist.monitored_barrier(timeout=timedelta(seconds=60))
    objects: list[Any] = [None] * size
    dist.all_gather_object(objects, {"rank": rank})
    assert objects == [{"rank": i} for i in range(size)]
    boxes: list[Any] = [{"a": 1}] if rank == 0 else [None]
    dist.broadcast_object_list(boxes, 0)
    assert boxes == [{"a": 1}]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pair = [torch.ones(2) * rank, torch.ones(3)]
        dist.all_reduce_coalesced(pair)
        assert pair[1].tolist() == [float(size)] * 3
    for row in all_done():
        assert row["done_ns"] >= row["begin_ns"] > 0, row
        assert not row["failed"], row
    sites = __import__("reft._C", fromlist=["_C"]).process_op_log().call_sites()
    assert any("backend_worker.py" in text and text.endswith(" collectives") for text in sites.values()), sites


def average(rank: int, size: int) -> None:
    for dtype in (torch.int64, torch.int32, torch.uint8):
        x = torch.tensor([rank + 1, 7], dtype=dtype)
        dist.all_reduce(x, op=dist.ReduceOp.AVG)
        assert x.tolist() == [sum(range(1, size + 1)) // size, 7], x
        x = torch.tensor([rank + 1, 7], dtype=dtype)
        assert dist.all_reduce(x, op=dist.ReduceOp.AVG, async_op=True).get_future().wait()[0].tolist()[1] == 7
    x = torch.tensor([-(rank + 1)])
    dist.all_reduce(x, op=dist.ReduceOp.AVG)
    assert x.item() == -(sum(range(1, size + 1)) // size)  # toward zero
    piece = torch.zeros(1, dtype=torch.int64)
    dist.reduce_scatter_tensor(piece, torch.full((size,), 3 + rank), op=dist.ReduceOp.AVG)
    assert piece.item() == sum(3 + r for r in range(size)) // size
    x = torch.tensor([rank + 1])
    dist.reduce(x, 0, op=dist.ReduceOp.AVG)
    assert rank != 0 or x.item() == sum(range(1, size + 1)) // size
    y = torch.tensor([float(rank + 1)])
    dist.all_reduce(y, op=dist.ReduceOp.AVG)
    assert y.item() == sum(range(1, size + 1)) / size


def messages(rank: int, size: int) -> None:
    other = (rank + 1) % size
    before = (rank - 1) % size
    x, y = torch.full((2,), float(rank)), torch.zeros(2)
    works = dist.batch_isend_irecv([dist.P2POp(dist.isend, x, other), dist.P2POp(dist.irecv, y, before)])
    assert len(works) == 2  # as gloo: it cannot coalesce
    for work in works:
        work.wait()
    assert y.tolist() == [float(before)] * 2
    if rank == 0:
        dist.send(x, 1, tag=5)
    elif rank == 1:
        assert dist.recv(y, tag=5) == 0
    # To itself: either order, and an answer that comes late.
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    z = torch.zeros(2)
    receive = backend.recv([z], rank, 3)
    assert not receive.is_completed()
    backend.send([x], rank, 3).wait()
    receive.wait()
    assert z.tolist() == x.tolist()
    backend.send([x + 1], rank, 4).wait()
    backend.recv([z], rank, 4).wait()
    assert z.tolist() == (x + 1).tolist()
    w = torch.zeros(2)
    for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, x, rank), dist.P2POp(dist.irecv, w, rank)]):
        work.wait()
    assert w.tolist() == x.tolist()
    # A coalesced region works on CPU as well.
    group, cpu = dist.group.WORLD, torch.device("cpu")
    group._start_coalescing(cpu)
    assert dist.isend(x, other) is None and dist.irecv(y, before) is None
    group._end_coalescing(cpu).wait()
    assert y.tolist() == [float(before)] * 2
    group._start_coalescing(cpu)
    assert group._end_coalescing(cpu) is None
    dist.barrier()
    rows = all_done()
    assert [r["seq"] for r in rows if r["op"] in ("send", "recv", "recv_anysource")] == list(
        range(1, 1 + sum(r["op"] in ("send", "recv", "recv_anysource") for r in rows))
    )
    sends = {r["signature"] for r in rows if r["op"] == "send" and r["bytes"] == 8}
    recvs = {r["signature"] for r in rows if r["op"] == "recv" and r["bytes"] == 8}
    assert len(sends) == 1 and sends == recvs


def groups(rank: int, size: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh

    world = dist.group.WORLD
    pairs = [dist.new_group([r]) for r in range(size)]
    x = torch.ones(1) * (rank + 1)
    dist.all_reduce(x, group=pairs[rank])
    assert x.item() == rank + 1
    same = dist.new_group(list(range(size)), timeout=timedelta(seconds=100), group_desc="other")
    dist.all_reduce(x, group=same)
    assert x.item() == sum(range(1, size + 1))
    plain = dist.new_group(list(range(size)), backend="gloo")
    dist.all_reduce(x, group=plain)
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("dp",))
    dist.all_reduce(x, group=mesh.get_group())
    mesh2 = init_device_mesh("cpu", (1, size), mesh_dim_names=("pp", "dp"))
    dist.all_reduce(x, group=mesh2.get_group("dp"))
    backend = world._get_backend(torch.device("cpu"))
    assert backend.name() == "reft" and backend.supports_splitting
    assert backend.perform_nocolor_split(torch.device("cpu")) is None
    import copy

    copied = copy.deepcopy(backend.options)
    assert copied._timeout == backend.options._timeout
    copied.group_name = "halves"
    opts = copied
    child = world.split_group([0, 1], timeout=timedelta(seconds=60), opts=opts, group_name="halves", group_desc="d")
    if rank < 2:
        y = torch.ones(1)
        child.allreduce([y]).wait()
        assert y.item() == 2
        assert child._get_backend(torch.device("cpu")).name() == "reft"
        child._get_backend(torch.device("cpu"))._set_sequence_number_for_group()
    assert backend.comm_split_count() == 1
    assert world._get_sequence_number_for_group() > 0
    if hasattr(world, "_set_sequence_number_for_group"):
        world._set_sequence_number_for_group()
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=77))
    assert backend.inner("cpu").options._timeout == timedelta(seconds=77), backend.inner("cpu").options._timeout
    dist.distributed_c10d._add_ephemeral_timeout_for_all_pgs(timedelta(seconds=1))
    assert not hasattr(backend, "register_mem_pool")
    names = [g[0] for g in __import__("reft._C", fromlist=["_C"]).process_op_log().groups()]
    assert len(set(names)) == len(names) >= 4, names
    dist.destroy_process_group(same)


def training(rank: int, size: int) -> None:
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        optimizer.zero_grad()
        model(torch.full((2, 8), float(rank + step))).sum().backward()
        optimizer.step()
    weights = nn.utils.parameters_to_vector(model.parameters()).detach()
    others = [torch.empty_like(weights) for _ in range(size)]
    dist.all_gather(others, weights)
    assert all(torch.equal(o, weights) for o in others)
    all_done()

    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    sharded = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (size,))
    for layer in sharded:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    optimizer = torch.optim.AdamW(sharded.parameters(), lr=0.01)
    for step in range(3):
        optimizer.zero_grad()
        sharded(torch.full((2, 8), float(rank + step))).sum().backward()
        optimizer.step()
    assert torch.isfinite(next(sharded.parameters()).full_tensor()).all()

    from torch.distributed.nn import functional as dist_functional

    base = torch.ones(2, requires_grad=True)
    out = torch.zeros(2 * size)
    gathered = dist_functional._all_gather_base(out, base)
    (gathered * (rank + 1)).sum().backward()
    assert base.grad is not None and base.grad.tolist() == [float(sum(range(1, size + 1)))] * 2
    pieces = [torch.ones(2, requires_grad=True) for _ in range(size)]
    sum(t.sum() for t in dist_functional.all_to_all([torch.zeros(2) for _ in range(size)], pieces)).backward()

    import torch.distributed._functional_collectives as functional

    y = functional.all_reduce(torch.ones(2), "sum", dist.group.WORLD)
    assert y.tolist() == [float(size)] * 2
    z = functional.all_gather_into_tensor_coalesced([torch.ones(2), torch.ones(3)], dist.group.WORLD)
    assert [len(t) for t in z] == [2 * size, 3 * size]


def pipeline(rank: int, size: int) -> None:
    from torch.distributed import pipelining
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
    from torch.distributed.pipelining.schedules import (
        ScheduleInterleaved1F1B,
        ScheduleZBVZeroBubble,
    )

    def stage(index: int, count: int) -> PipelineStage:
        torch.manual_seed(index)
        return PipelineStage(nn.Linear(4, 4), index, count, torch.device("cpu"))

    def run(schedule: Any, first: bool, last: bool) -> None:
        for _ in range(2):
            kwargs = {"target": torch.zeros(8, 4)} if last else {}
            schedule.step(*((torch.ones(8, 4),) if first else ()), **kwargs)

    def loss(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return ((a - b) ** 2).mean()

    assert pipelining
    for kind in (ScheduleGPipe, Schedule1F1B):
        run(kind(stage(rank, size), 4, loss_fn=loss), rank == 0, rank == size - 1)
    run(
        ScheduleInterleaved1F1B([stage(rank, 2 * size), stage(rank + size, 2 * size)], 4, loss_fn=loss),
        rank == 0,
        rank == size - 1,
    )
    vee = [stage(rank, 2 * size), stage(2 * size - 1 - rank, 2 * size)]
    run(ScheduleZBVZeroBubble(vee, 4, loss_fn=loss), rank == 0, rank == 0)
    all_done()


def errors(rank: int, size: int) -> None:
    def text(group: Any) -> str:
        out = [torch.zeros(1) for _ in range(size)]
        return raises(RuntimeError, lambda: group.allgather([out], [torch.zeros(3)]).wait())

    plain = dist.new_group(list(range(size)), backend="gloo")
    assert text(plain) == text(dist.group.WORLD)
    assert [r for r in records() if r["failed"]]
    dist.all_reduce(torch.ones(1))
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    z = torch.zeros(1)
    said = raises(RuntimeError, lambda: backend.recv([z], rank, 99).wait(timedelta(milliseconds=50)))
    assert "receives from itself" in said
    assert len(dist.group.WORLD._get_backend(torch.device("cpu")).inner("cpu").name()) > 0
    if size > 1 and rank == 0:
        said = raises(RuntimeError, lambda: dist.monitored_barrier(timeout=timedelta(seconds=2)))
        assert "1" in said
    elif rank == 1:
        time.sleep(4)


def futures(rank: int, size: int) -> None:
    work = dist.all_reduce(torch.ones(4), async_op=True)
    work.get_future().wait()
    all_done()
    dist.all_reduce(torch.ones(4), async_op=True)  # dropped without wait
    all_done()
    dist.all_reduce(torch.zeros(0))
    assert records()[-1]["bytes"] == 0
    dist.barrier()


def detail(rank: int, size: int) -> None:
    assert os.environ["TORCH_DISTRIBUTED_DEBUG"] == "DETAIL"
    x = torch.ones(1)
    dist.all_reduce(x)
    dist.new_group(list(range(size)))
    dist.monitored_barrier()
    assert dist.group.WORLD._get_sequence_number_for_group() >= 0
    from reft._torch import patches

    backend = patches.backend_of(None)
    assert backend is not None and not backend.closed
    dist.destroy_process_group()
    assert backend.closed


def undestroyed(rank: int, size: int) -> None:
    model = nn.parallel.DistributedDataParallel(nn.Linear(4, 4))
    model(torch.ones(1, 4)).sum().backward()
    globals()["kept"] = (model, dist.all_reduce(torch.ones(1), async_op=True))


def again(rank: int, size: int) -> None:
    for _ in range(3):
        dist.all_reduce(torch.ones(1))
        dist.destroy_process_group()
        dist.init_process_group("reft")
    dist.all_reduce(torch.ones(1))


def killed(rank: int, size: int) -> None:
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    group = dist.new_group(list(range(size)))
    dist.all_reduce(torch.ones(1), group=group)
    if attempt < 3 and rank == attempt % size:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(1))
    print(f"attempt {attempt} done", flush=True)


def loader(rank: int, size: int) -> None:
    from torch.utils.data import DataLoader

    for context in ("fork", "spawn"):
        data = DataLoader(list(range(8)), batch_size=2, num_workers=1, multiprocessing_context=context)
        assert sum(int(b.sum()) for b in data) == 28
    dist.all_reduce(torch.ones(1))


def disabled(rank: int, size: int) -> None:
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    assert type(backend).__name__ == "ProcessGroupGloo", backend
    x = torch.ones(1)
    dist.all_reduce(x)
    assert x.item() == size
    dist.new_group(list(range(size)))
    dist.barrier()  # a rank that ends while others still connect would take them along
    assert "reft" not in sys.modules and "reft._C" not in sys.modules


def main() -> None:
    case = sys.argv[1]
    dist.init_process_group("reft")
    rank, size = dist.get_rank(), dist.get_world_size()
    globals()[case](rank, size)
    print(f"ok {rank}", flush=True)
    if case != "undestroyed" and dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
