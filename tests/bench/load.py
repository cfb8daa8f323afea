"""How fast a job gets its state back: from vaults in memory, with nothing lost and with a lost
vault, against a checkpoint on storage at 10 Gb/s.

    tools/dev bench load [--state-mb 150] [--ranks 3] [--repeats 5] [--rounds 3] [--json FILE]

A DDP job with AdamW, all ranks on one node. Each round runs it twice, once with
REFT_SNAPSHOT_PROTECTION=arc and once with aec. Each job measures, in a random order, --repeats
times after a warm-up:

- `restore`: the whole state from the vaults of all ranks; every checksum is verified;
- `after_loss`: the same, planned without the vault of the last rank. Its shard comes from its copy
  (arc), or each rank decodes it from the parities and the other shards (aec). With two ranks, a
  parity is a copy, and nothing is decoded;
- `storage`: every rank loads its full replica from a file whose reads are throttled: together, the
  ranks get 1.25 GB/s, in equal parts;
- `cached`: the same from the page cache, at full speed;
- `memcpy`: the same bytes from memory of the rank to its live tensors.

A time is that of the slowest rank. On one node, no part crosses a network. A network would take the
same time in both jobs, and so hide a part of what decoding takes. reft warns in both that a lost
node is not survived, as there is only one; the vault that counts as lost is still there.

The model favours storage: reads have no latency, opening a file costs nothing, no other job uses the
network, and the client reads ahead without a limit, so bytes arrive while the rank computes. A load
is `torch.load` and `load_state_dict` of the model; that of the optimizer, which keeps the loaded
tensors, is left out. `torch.distributed.checkpoint.load` took 0.7 to 1.6 times as long from the
page cache of two busy cores. From storage, both wait for the bytes: `line rate / restore` compares
the restore with a load that takes no other time.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.support import report

STORAGE_BYTES_PER_SEC = 1.25e9  # 10 Gb/s
PROTECTIONS = ("arc", "aec")
GOAL_LOAD = 12.0
GOAL_DECODE = 1.15
FEWEST_THAT_DECODE = 3


class Throttled(io.FileIO):
    """A file to read. By any time after its opening, no more bytes than `bytes_per_sec` allows."""

    def __init__(self, path: Path, bytes_per_sec: float) -> None:
        super().__init__(path)
        self._opened, self._taken, self._rate = time.perf_counter(), 0, bytes_per_sec

    def read(self, size: int | None = -1, /) -> bytes:
        data = super().read(-1 if size is None else size)
        self._take(len(data))
        return data

    def readinto(self, buffer: Any, /) -> int:
        count = super().readinto(buffer)
        self._take(count)
        return count

    def _take(self, count: int) -> None:
        self._taken += count
        early = self._opened + self._taken / self._rate - time.perf_counter()
        if early > 0:
            time.sleep(early)


def worker(args: argparse.Namespace) -> None:
    import torch
    import torch.distributed as dist

    from tests.support.restored import Restored

    torch.set_num_threads(1)
    dist.init_process_group(backend="reft")
    rank, world = dist.get_rank(), dist.get_world_size()
    job = Restored(args.state_mb)
    intact, bereft = job.plan(), job.plan(lost={world - 1})
    checkpoint = Path(args.out) / "checkpoint.pt"
    if rank == 0:
        saved = {"model": job.model.state_dict(), "optimizer": job.optimizer.state_dict()}
        torch.save(saved, checkpoint)
    dist.barrier()

    def load(bytes_per_sec: float | None) -> float:
        for parameter in job.model.parameters():
            parameter.detach().fill_(7)
        dist.barrier()
        begin = time.perf_counter()
        opened = Throttled(checkpoint, bytes_per_sec) if bytes_per_sec else checkpoint.open("rb")
        with opened as file:
            loaded = torch.load(file, weights_only=True)
        job.model.load_state_dict(loaded["model"])
        took = time.perf_counter() - begin
        dist.barrier()
        job.check()
        moments = loaded["optimizer"]["state"]
        for number, ours in job.optimizer.state_dict()["state"].items():
            assert all(torch.equal(moments[number][name], value) for name, value in ours.items())
        return took

    ways = {
        "restore": lambda: job.restore(intact),
        "after_loss": lambda: job.restore(bereft),
        "storage": lambda: load(STORAGE_BYTES_PER_SEC / world),
        "cached": lambda: load(None),
        "memcpy": job.copy,
    }
    took: dict[str, list[float]] = {name: [] for name in ways}
    for repeat in range(args.repeats + 1):
        # All ranks draw the same order.
        for name in random.Random(repeat).sample(list(ways), len(ways)):
            dist.barrier()
            seconds = ways[name]()
            if repeat > 0:  # else it is the warm-up
                took[name].append(seconds)
    found = {"took": took, "bytes": job.total}
    (Path(args.out) / f"{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def run_job(protection: str, args: argparse.Namespace) -> list[Any] | None:
    with tempfile.TemporaryDirectory() as folder:
        environment = {
            "REFT_SNAPSHOT_PROTECTION": protection,
            "REFT_RUN_DIR": str(Path(folder) / "run"),
            "REFT_JOB_ID": f"load-{protection}-{os.getpid()}",
            "REFT_AGENT_LINGER_SEC": "1",
        }
        settings = {"state-mb": args.state_mb, "repeats": args.repeats}
        return report.run_ranks(__file__, args.ranks, Path(folder), settings, environment)


def metrics_of(
    took: dict[str, dict[str, list[float]]], gigabytes: float, ranks: int
) -> dict[str, dict[str, Any]]:
    """`took`: seconds by protection and by way."""
    both = {way: took["arc"][way] + took["aec"][way] for way in took["arc"]}

    def rate(seconds: list[float]) -> dict[str, Any]:
        rates = [gigabytes / one for one in seconds]
        return report.metric(report.median(rates), "GB/s per rank", report.mad(rates))

    against, spread = report.ratio(both["storage"], both["restore"])
    decode, decode_spread = report.ratio(took["aec"]["after_loss"], took["arc"]["after_loss"])
    goal, meets = "", None
    if ranks >= FEWEST_THAT_DECODE:
        goal = f"<= {GOAL_DECODE:g}"
        meets = report.at_most(decode, decode_spread, GOAL_DECODE)
    cached, cached_spread = report.ratio(both["cached"], both["restore"])
    line = [ranks * gigabytes * 1e9 / STORAGE_BYTES_PER_SEC]
    bytes_alone, bytes_spread = report.ratio(line, both["restore"])
    copied, copied_spread = report.ratio(both["restore"], both["memcpy"])
    return {
        "storage / restore": report.metric(
            against, "x", spread, f">= {GOAL_LOAD:g}", report.at_least(against, spread, GOAL_LOAD)
        ),
        "line rate / restore": report.metric(bytes_alone, "x", bytes_spread),
        "after loss, aec / arc": report.metric(decode, "x", decode_spread, goal, meets),
        "page cache / restore": report.metric(cached, "x", cached_spread),
        "restore / memcpy": report.metric(copied, "x", copied_spread),
        "restore": rate(both["restore"]),
        "restore after loss, arc": rate(took["arc"]["after_loss"]),
        "restore after loss, aec": rate(took["aec"]["after_loss"]),
        "load from storage": rate(both["storage"]),
        "load from page cache": rate(both["cached"]),
        "memcpy": rate(both["memcpy"]),
        "state": report.metric(gigabytes, "GB"),
    }


def notes_of(metrics: dict[str, dict[str, Any]], ranks: int) -> list[str]:
    """What limits the figures."""
    cores = len(os.sched_getaffinity(0))
    bound = metrics["memcpy"]["value"] / metrics["load from storage"]["value"]
    notes = [
        f"{ranks} ranks on {cores} cores, all at once. A memcpy by each of them instead of the"
        f" restore would be {bound:.3g} times as fast as storage: a restore with one thread a rank"
        " cannot be faster than that"
    ]
    if ranks < FEWEST_THAT_DECODE:
        notes.append(
            f"with {ranks} ranks a parity is a copy: aec / arc needs --ranks {FEWEST_THAT_DECODE}"
        )
    return notes


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--state-mb", type=int, default=150, help="of each replica")
    parser.add_argument("--ranks", type=int, default=3, choices=range(2, 5))
    parser.add_argument("--repeats", type=int, default=5, help="in each job")
    parser.add_argument("--rounds", type=int, default=3, help="one job of each protection in each")
    if (args := report.arguments(parser, worker)) is None:
        return 0

    took: dict[str, dict[str, list[float]]] = {name: {} for name in PROTECTIONS}
    gigabytes = 0.0
    for round_ in range(args.rounds):
        for protection in PROTECTIONS if round_ % 2 == 0 else reversed(PROTECTIONS):
            found = run_job(protection, args)
            if found is None:
                print(f"load: a rank failed (REFT_SNAPSHOT_PROTECTION={protection})")
                return 1
            gigabytes = found[0]["bytes"] / 1e9
            for way in found[0]["took"]:
                times = [one["took"][way] for one in found]
                slowest = [max(ranks) for ranks in zip(*times, strict=True)]
                took[protection].setdefault(way, []).extend(slowest)
    metrics = metrics_of(took, gigabytes, args.ranks)
    notes = notes_of(metrics, args.ranks)
    report.write(args.json, "bench load", metrics, notes=notes, more={"seconds": took})
    return 0


if __name__ == "__main__":
    sys.exit(main())
