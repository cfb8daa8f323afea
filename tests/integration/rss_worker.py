"""Trains 2,100 tiny steps and notes memory and descriptors of rank 0 and of the agent, early and at the end: rss_worker.py OUT"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def rss(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def agent() -> int:
    run_dir = os.environ["REFT_RUN_DIR"].encode()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
        except OSError:
            continue
        if words[0].endswith(b"reft-agent") and run_dir in words:
            return int(path.parent.name)
    raise RuntimeError("no agent")


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("reft")
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(128, 512), nn.Tanh(), nn.Linear(512, 128)))
    optimizer = torch.optim.AdamW(model.parameters())
    rows: dict[str, int] = {}
    for step in range(2100):
        model(torch.randn(4, 128)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step in (400, 2099) and dist.get_rank() == 0:
            when = "early" if step == 400 else "end"
            rows[f"rank_rss_{when}"], rows[f"agent_rss_{when}"] = rss(os.getpid()), rss(agent())
            rows[f"fds_{when}"] = len(os.listdir("/proc/self/fd")) + len(os.listdir(f"/proc/{agent()}/fd"))
    if dist.get_rank() == 0:
        import reft

        status = reft.status()
        rows |= {
            k: status[k]
            for k in ("captured", "dropped", "skipped", "state_bytes", "payload_bytes", "vault_bytes", "slot_bytes")
        }
        rows["op_log_bytes"] = 16384 * 128
        Path(sys.argv[1]).write_text(json.dumps(rows))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
