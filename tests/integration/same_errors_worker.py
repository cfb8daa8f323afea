"""Wrong arguments on two ranks: raises on reft what it raises on gloo, type and text.

Run under torchrun by test_backend_cases.py. Each call is refused before anything is sent. Prints
``ok RANK``.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import zeros


def with_root(options: Any, rank: int, tensor: int | None = None) -> Any:
    options.rootRank = rank
    if tensor is not None:
        options.rootTensor = tensor
    return options


def reduced_by(op: Any) -> Any:
    options = dist.AllreduceOptions()
    options.reduceOp = op
    return options


def calls(group: Any) -> dict[str, Callable[[], Any]]:
    """The wrong calls, by name."""
    one, two, whole = zeros(1), zeros(2), zeros(1, dtype=torch.int)
    sparse = torch.sparse_coo_tensor([[0]], [1.0], (2,))
    coalesced = dist.AllreduceCoalescedOptions()
    broadcast, reduce = dist.BroadcastOptions, dist.ReduceOptions
    gather, scatter = dist.GatherOptions, dist.ScatterOptions
    own = dist.get_rank()
    return {
        "all_reduce of nothing": lambda: group.allreduce([]),
        "all_reduce of two types": lambda: group.allreduce([one, whole]),
        "all_reduce of two layouts": lambda: group.allreduce([sparse, two]),
        "all_reduce of None": lambda: group.allreduce(None),
        "all_reduce by BAND": lambda: group.allreduce([one], reduced_by(dist.ReduceOp.BAND)),
        "all_reduce_coalesced of nothing": lambda: group.allreduce_coalesced([], coalesced),
        "all_reduce_coalesced of two types": lambda: group.allreduce_coalesced(
            [one, whole], coalesced
        ),
        "all_reduce_coalesced of two layouts": lambda: group.allreduce_coalesced(
            [one, sparse], coalesced
        ),
        "broadcast from -1": lambda: group.broadcast([one], with_root(broadcast(), -1, 0)),
        "broadcast from 2": lambda: group.broadcast([one], with_root(broadcast(), 2, 0)),
        "broadcast of tensor 1": lambda: group.broadcast([one], with_root(broadcast(), 0, 1)),
        "broadcast of nothing": lambda: group.broadcast([], with_root(broadcast(), 0, 0)),
        "broadcast of two types": lambda: group.broadcast(
            [one, whole], with_root(broadcast(), 0, 0)
        ),
        "broadcast of two sizes": lambda: group.broadcast([one, two], with_root(broadcast(), 0, 0)),
        "gather to -1": lambda: group.gather([], [one], with_root(gather(), -1)),
        "gather to 2": lambda: group.gather([], [one], with_root(gather(), 2)),
        "gather of two": lambda: group.gather([], [one, one], with_root(gather(), 0)),
        "gather without outputs": lambda: group.gather([], [one], with_root(gather(), own)),
        "gather into three": lambda: group.gather([[one] * 3], [one], with_root(gather(), own)),
        "gather into another size": lambda: group.gather(
            [[two] * 2], [one], with_root(gather(), own)
        ),
        "gather into another type": lambda: group.gather(
            [[whole] * 2], [one], with_root(gather(), own)
        ),
        "scatter from -1": lambda: group.scatter([one], [], with_root(scatter(), -1)),
        "scatter from 2": lambda: group.scatter([one], [], with_root(scatter(), 2)),
        "scatter into nothing": lambda: group.scatter([], [], with_root(scatter(), own)),
        "scatter into two": lambda: group.scatter([one, one], [], with_root(scatter(), own)),
        "scatter without inputs": lambda: group.scatter([one], [], with_root(scatter(), own)),
        "scatter of three": lambda: group.scatter([one], [[one] * 3], with_root(scatter(), own)),
        "scatter of another size": lambda: group.scatter(
            [one], [[two] * 2], with_root(scatter(), own)
        ),
        "reduce to -1": lambda: group.reduce([one], with_root(reduce(), -1, 0)),
        "reduce to 2": lambda: group.reduce([one], with_root(reduce(), 2, 0)),
        "reduce of tensor 1": lambda: group.reduce([one], with_root(reduce(), 0, 1)),
        "reduce of two": lambda: group.reduce([one, one], with_root(reduce(), 0, 0)),
        "all_gather of nothing": lambda: group.allgather([[one] * 2], []),
        "all_gather without outputs": lambda: group.allgather([], [one]),
        "all_gather of two": lambda: group.allgather([[one] * 2], [one, one]),
        "all_gather into three": lambda: group.allgather([[one] * 3], [one]),
        "all_gather into another type": lambda: group.allgather([[whole] * 2], [one]),
        "all_gather into another size": lambda: group.allgather([[two] * 2], [one]),
        "all_gather_coalesced without outputs": lambda: group.allgather_coalesced([], [one]),
        "all_gather_coalesced into another size": lambda: group.allgather_coalesced(
            [[two], [two]], [one]
        ),
        "all_gather_into_tensor of 3": lambda: group._allgather_base(zeros(3), one),
        "reduce_scatter of another size": lambda: group.reduce_scatter([one], [[two] * 2]),
        "reduce_scatter of three": lambda: group.reduce_scatter([one], [[one] * 3]),
        "reduce_scatter_tensor of 3": lambda: group._reduce_scatter_base(one, zeros(3)),
        "all_to_all of other splits": lambda: group.alltoall_base(two, two, [1, 2], [1, 1]),
        "send of two": lambda: group.send([one, one], 1 - own, 0),
        "send with tag -1": lambda: group.send([one], 1 - own, -1),
        "send to itself of two": lambda: group.send([one, one], own, 0),
        "send to itself with tag -1": lambda: group.send([one], own, -1),
        "receive nothing": lambda: group.recv([], 1 - own, 0),
        "receive from itself into two": lambda: group.recv([one, one], own, 0),
        "receive from itself with tag -1": lambda: group.recv([one], own, -1),
    }


def raised(call: Callable[[], Any]) -> str:
    """Type and first line of the error, without addresses and times."""
    try:
        call().wait()
    except Exception as error:  # noqa: BLE001
        text = (str(error).splitlines() or [""])[0]
        return f"{type(error).__name__}: {re.sub(r'F[0-9]{4} [0-9:.]+', '', text)}"
    return "nothing"


def main() -> None:
    dist.init_process_group("reft")
    rank = int(os.environ["RANK"])
    plain = dist.new_group(backend="gloo")
    wrong = {}
    other = calls(plain)
    for name, call in calls(dist.group.WORLD).items():
        ours, theirs = raised(call), raised(other[name])
        if theirs == "nothing":
            wrong[name] = "gloo raises nothing: no call for this test"
        elif ours != theirs:
            wrong[name] = f"{ours}, not {theirs}"
    assert not wrong, "\n".join(f"{name}: {text}" for name, text in wrong.items())
    # gloo reads beyond its table here, and sometimes waits for ever.
    for peer in (-1, 2):
        text = raised(lambda peer=peer: dist.group.WORLD.send([zeros(1)], peer, 0))
        assert text == f"ValueError: send: rank {peer} is not in this group of 2 ranks", text
        text = raised(lambda peer=peer: dist.group.WORLD.recv([zeros(1)], peer, 0))
        assert text == f"ValueError: recv: rank {peer} is not in this group of 2 ranks", text
    dist.barrier()
    print(f"ok {rank}", flush=True)
    dist.destroy_process_group()


main()
