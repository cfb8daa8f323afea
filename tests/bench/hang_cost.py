"""What watching for hangs costs while nothing hangs: processor time and wake-ups of reft's threads
and of the agent.

A job of ranks that call a few collectives a step and compute or sleep in between; no optimizer, so
that nothing is copied. What reft does beside it is added up from the kernel's own accounts (run
time and voluntary switches of each thread named `reft-…`, and of the agent), because a thousandth
of a step is far below the noise of its wall time. The marks of the op log, which are on the
training path, are measured by `op_overhead.py`.

    python tests/bench/hang_cost.py [--ranks 4] [--sec 30] [--step-ms 100] [--ops 10] [--json FILE]
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from tests.support import report

GOAL_PERCENT = 0.5
GOAL_WAKEUPS = 1.0


def spent(pid: int, prefix: str) -> tuple[int, Counter[str]]:
    """Run time in ns of a process's threads whose names begin with `prefix`, and their voluntary switches by name."""
    run_ns, switches = 0, Counter[str]()
    for task in Path(f"/proc/{pid}/task").iterdir():
        name = (task / "comm").read_text().strip()
        if name.startswith(prefix):
            run_ns += int((task / "schedstat").read_text().split()[0])
            status = (task / "status").read_text()
            switches[name] += int(status.split("\nvoluntary_ctxt_switches:")[1].split()[0])
    return run_ns, switches


def worker(args: argparse.Namespace) -> None:
    import json

    import torch
    import torch.distributed as dist

    from tests.support.launchers import agent_pids

    torch.set_num_threads(1)
    dist.init_process_group(backend="reft")
    rank = dist.get_rank()
    (agent,) = agent_pids(Path(os.environ["REFT_RUN_DIR"]))
    values = torch.ones(1024)

    def train(sec: float) -> tuple[int, float]:
        """Steps, and how long they took."""
        begin, steps, on = time.monotonic(), 0, torch.ones(1)
        while on.item():
            due = time.monotonic() + args.step_ms / 1e3
            for _ in range(args.ops):
                dist.all_reduce(values)
            time.sleep(max(0.0, due - time.monotonic()))
            steps += 1
            on.fill_(float(time.monotonic() - begin < sec))
            dist.broadcast(on, 0)
        return steps, time.monotonic() - begin

    train(3)
    before, agent_before = spent(os.getpid(), "reft"), spent(agent, "")
    steps, took = train(args.sec)
    after, agent_after = spent(os.getpid(), "reft"), spent(agent, "")
    wakeups = {name: count / took for name, count in (after[1] - before[1]).items()}
    found = {
        "steps": steps,
        "took": took,
        "run_ns": after[0] - before[0],
        "wakeups": wakeups,
        "agent_ns": agent_after[0] - agent_before[0],
        "agent_wakeups": (agent_after[1] - agent_before[1]).total() / took,
    }
    (Path(args.out) / f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--sec", type=float, default=30)
    parser.add_argument("--step-ms", type=float, default=100)
    parser.add_argument("--ops", type=int, default=10, help="collectives a step")
    if (args := report.arguments(parser, worker)) is None:
        return 0

    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        environment = {
            "REFT_RUN_DIR": str(run),
            "REFT_JOB_ID": f"hang-cost-{os.getpid()}",
            "REFT_AGENT_LINGER_SEC": "1",
        }
        settings = {"sec": args.sec, "step-ms": args.step_ms, "ops": args.ops}
        ranks = report.run_ranks(__file__, args.ranks, Path(folder), settings, environment)
    if ranks is None:
        print("hang_cost: a rank failed", file=sys.stderr)
        return 1
    took = report.median([rank["took"] for rank in ranks])
    # The agent's time is of a processor that ranks could have had; it is shared out among them.
    agent = ranks[0]["agent_ns"] / args.ranks
    shares = [100 * (rank["run_ns"] + agent) / 1e9 / took for rank in ranks]
    wakeups = [sum(rank["wakeups"].values()) for rank in ranks]
    cost, waked = report.median(shares), report.median(wakeups)
    metrics = {
        "cost": report.metric(cost, "% of a step", report.mad(shares), f"<= {GOAL_PERCENT}", cost <= GOAL_PERCENT),
        "wakeups": report.metric(
            waked, "/s a rank", report.mad(wakeups), f"<= {GOAL_WAKEUPS:g}", waked <= GOAL_WAKEUPS
        ),
        "agent": report.metric(100 * ranks[0]["agent_ns"] / 1e9 / took, "% of a processor, all ranks together"),
        "agent_wakeups": report.metric(ranks[0]["agent_wakeups"], "/s a node"),
        "step_ms": report.metric(1e3 * took / ranks[0]["steps"], "ms"),
    }
    notes = [f"{args.ops} collectives a step"]
    notes += [f"rank {number}: {rank['wakeups']}" for number, rank in enumerate(ranks)]
    report.write(args.json, "tools/dev bench hang_cost", metrics, notes=notes)
    return 0


if __name__ == "__main__":
    sys.exit(main())
