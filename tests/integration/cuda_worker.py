"""Started by torchrun: what test_cuda.py asks of ranks that have a CUDA device each, real or
stand-in.

    cuda_worker.py collectives|ddp|graph|graph_aside BACKEND DEVICE FOLDER

Each rank writes what it has found to FOLDER/<rank>.json.
"""

from __future__ import annotations

import json
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.integration.never_wrong_worker import Checker


def collectives(device: torch.device) -> dict[str, Any]:
    rank, world = dist.get_rank(), dist.get_world_size()
    total = world * (world + 1) / 2
    found: dict[str, Any] = {}
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.int64):
        tensor = torch.full((100_003,), rank + 1, dtype=dtype, device=device)
        dist.all_reduce(tensor)
        found[f"all_reduce {dtype}"] = bool((tensor == total).all())
    tensor = torch.full((9,), float(rank), device=device)
    dist.broadcast(tensor, src=world - 1)
    found["broadcast"] = bool((tensor == world - 1).all())
    gathered = torch.empty(world * 5, device=device)
    dist.all_gather_into_tensor(gathered, torch.full((5,), float(rank), device=device))
    found["all_gather"] = gathered.view(world, 5)[:, 0].tolist() == [float(r) for r in range(world)]
    piece = torch.empty(1001, device=device)
    dist.reduce_scatter_tensor(piece, torch.arange(world, device=device).float().repeat_interleave(1001))
    found["reduce_scatter"] = bool((piece == rank * world).all())
    received = torch.empty(70_000, device=device)
    ops = [
        dist.P2POp(dist.isend, torch.full((70_000,), float(rank), device=device), (rank + 1) % world),
        dist.P2POp(dist.irecv, received, (rank - 1) % world),
    ]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    found["send and receive"] = bool((received == (rank - 1) % world).all())
    work = dist.all_reduce(torch.ones(10, device=device), async_op=True)
    work.wait()
    dist.barrier()
    on_host = torch.full((3,), float(rank + 1))
    if dist.get_backend() != "nccl":
        dist.all_reduce(on_host)
        found["all_reduce on the host"] = bool((on_host == total).all())
    objects: list[Any] = [None] * world
    dist.all_gather_object(objects, {"rank": rank})
    found["objects"] = [o["rank"] for o in objects] == list(range(world))
    return found


def ddp(device: torch.device) -> dict[str, Any]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(16, 32), torch.nn.LayerNorm(32), torch.nn.GELU(), torch.nn.Linear(32, 8)
    )
    replicas = torch.nn.parallel.DistributedDataParallel(model.to(device))
    optimizer = torch.optim.AdamW(replicas.parameters(), lr=1e-2)
    data = torch.Generator().manual_seed(dist.get_rank())
    losses = []
    for _ in range(3):
        inputs = torch.randn(4, 16, generator=data).to(device)
        targets = torch.randint(0, 8, (4,), generator=data).to(device)
        loss = torch.nn.functional.cross_entropy(replicas(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item().hex())
    return {"losses": losses}


def graph(device: torch.device, aside: bool = False) -> dict[str, Any]:
    """A training step that is captured after five ordinary ones, and replayed.

    Args:
        aside: replayed on the stream of the ordinary steps, which no variable holds, and not on the
            current one.
    """
    import reft

    model = torch.nn.Linear(64, 64).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    x = torch.randn(8, 64).to(device)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        model(x).square().mean().backward()
        optimizer.step()

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(5):
            step()
    torch.cuda.current_stream().wait_stream(side)
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        step()
    which = {"stream_id": side.stream_id, "device_index": side.device_index, "device_type": side.device_type}
    del side

    def stream() -> torch.cuda.Stream:
        return torch.cuda.Stream(**which) if aside else torch.cuda.current_stream()

    def replay() -> None:
        stream().wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream()):
            captured.replay()

    checker = Checker(lambda: [model])
    skipped = reft.status()["skipped"]
    for _ in range(12):
        replay()
        reft.step()
        torch.cuda.current_stream().wait_stream(stream())
        clones = [tensor.detach().clone() for tensor in checker.tensors()]
        replay()  # nothing tells reft that this writes
        torch.cuda.synchronize()
        reft.snapshot_now()
        checker.clones = {reft.status()["steps"]: [clone.cpu() for clone in clones]}
        checker.check()
    status = reft.status()
    return {
        "wrong": checker.wrong,
        "verified": len(checker.verified),
        "errors": status["errors"],
        "skipped": status["skipped"] - skipped,
    }


def main() -> None:
    what, backend, kind, folder = sys.argv[1:]
    if kind == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(backend)
    device = torch.device(kind, int(os.environ["LOCAL_RANK"]) if kind == "cuda" else 0)
    found = {"collectives": collectives, "ddp": ddp, "graph": graph, "graph_aside": partial(graph, aside=True)}[what](
        device
    )
    Path(folder, f"{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
