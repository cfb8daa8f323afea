"""Nodes of a check on one machine: imports reft once, and forks one process for each node, which
enters a network namespace.

    checknodes.py JSON    {"addresses", "namespaces", "port", "out", "quick", "cards", "absent",
                         "silent", "wait"}

What nodes measure alone is played (equal values), so that a test sees the network. Each node writes
`OUT/NODE.json`: the verdict, or the error. `absent` nodes do not start; `silent` ones stop at the
first round.
"""

import ctypes
import json
import os
import signal
import sys
import traceback
from datetime import timedelta
from pathlib import Path

_CLONE_NEWNET = 0x40000000


def measure(directory, quick):
    from reft._check.evidence import Part

    return (Part("memory", "memory X", 20.0, "GB/s"),), 20.0


def run(asked, node):
    import torch.distributed as dist

    from reft._check import evidence
    from reft._check import node as check

    if asked["namespaces"][node]:
        file = os.open(asked["namespaces"][node], os.O_RDONLY)
        if ctypes.CDLL(None, use_errno=True).setns(file, _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")
        os.close(file)
    if node in asked.get("silent", []):
        check._Node._take_part = lambda *a: os.kill(os.getpid(), signal.SIGKILL)
    addresses = asked["addresses"]
    store = dist.TCPStore(
        addresses[0], asked["port"], None, node == 0, timedelta(seconds=30), wait_for_workers=False
    )
    cards = tuple(asked["cards"][node]) if "cards" in asked else (addresses[node],)
    wait_sec = asked.get("wait", 20.0)
    options = check.Options(node, len(addresses), cards, Path("/tmp"), asked["quick"], wait_sec)
    outcome = check.together(options, store, measure)
    return {"verdict": evidence.dump_verdict(outcome.verdict), "rounds": outcome.rounds}


def main():
    asked = json.loads(sys.argv[1])
    import torch.distributed  # noqa: F401

    import reft._check.node  # noqa: F401

    started = []
    for node in range(len(asked["addresses"])):
        if node in asked.get("absent", []):
            continue
        if pid := os.fork():
            started.append(pid)
            continue
        code = 0
        try:
            result = run(asked, node)
        except BaseException as error:
            traceback.print_exc()
            result, code = {"error": f"{type(error).__name__}: {error}"}, 1
        (Path(asked["out"]) / f"{node}.json").write_text(json.dumps(result))
        os._exit(code)
    for pid in started:
        os.waitpid(pid, 0)


if __name__ == "__main__":
    main()
