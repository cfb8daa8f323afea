"""How fast what AdamW keeps is advanced without its parameters (`aor`), against torch's AdamW,
fused and as it is by default, and against the bandwidth of the memory (STREAM's triad).

    python tests/bench/adam.py [--repeats 40] [--mib 64] [--tensors 4] [--dtype …] [--json FILE]

All on one thread. Steps of all kinds take turns. Rates count the bytes of exp_avg and exp_avg_sq,
which are as many for all of them; the comparison with the triad counts all bytes that are read and
written (by the triad, four for each three: it fetches the lines that it overwrites). torch also
steps the parameters, which a rank that has them already need not do again.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable

import torch

from reft._state import moments
from tests.support import report

WARM_UP = 2  # rounds


def adamw(dtype: torch.dtype, tensors: int, numbers: int, **settings: bool) -> Callable[[], None]:
    """A step of torch's own."""
    parameters = [torch.nn.Parameter(torch.randn(numbers, dtype=dtype)) for _ in range(tensors)]
    for parameter in parameters:
        parameter.grad = torch.randn(numbers, dtype=dtype)
    return torch.optim.AdamW(parameters, lr=1e-6, **settings).step


def by_rule(dtype: torch.dtype, tensors: int, numbers: int) -> Callable[[], None]:
    """As a rank advances what another one keeps."""
    parameter = torch.nn.Parameter(torch.randn(1))
    rule = moments.rule_of(torch.optim.AdamW, torch.optim.AdamW([parameter]).param_groups[0])
    assert rule is not None
    entries: list[moments.Entry] = []
    for _ in range(tensors):
        state = {name: torch.zeros(numbers, dtype=dtype) for name in ("exp_avg", "exp_avg_sq")}
        state["step"] = torch.tensor(0.0)
        gradient = torch.randn(numbers, dtype=dtype)
        entries.append((gradient, gradient, state))  # AdamW reads no parameters
    return lambda: rule.advance(entries)


def triad(dtype: torch.dtype, tensors: int, numbers: int) -> Callable[[], None]:
    a, b, c = (torch.randn(tensors * numbers, dtype=dtype) for _ in range(3))

    def run() -> None:
        torch.add(b, c, alpha=3, out=a)

    return run


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--mib", type=int, default=64, help="of each list of tensors")
    parser.add_argument("--tensors", type=int, default=4)
    parser.add_argument("--dtype", choices=("float32", "float64"), default="float32")
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    torch.set_num_threads(1)
    dtype = getattr(torch, args.dtype)
    numbers = (args.mib << 20) // args.tensors // dtype.itemsize
    size = args.tensors * numbers * dtype.itemsize
    calls = {
        "by reft": by_rule(dtype, args.tensors, numbers),
        "AdamW, fused": adamw(dtype, args.tensors, numbers, fused=True),
        "AdamW": adamw(dtype, args.tensors, numbers),
        "triad": triad(dtype, args.tensors, numbers),
    }
    rates: dict[str, list[float]] = {name: [] for name in calls}
    names = list(calls)
    for index in range(args.repeats + WARM_UP):
        turn = index % len(names)
        for name in names[turn:] + names[:turn]:
            begin = time.perf_counter()
            calls[name]()
            seconds = time.perf_counter() - begin
            if index >= WARM_UP:
                rates[name].append((4 if name == "triad" else 2) * size / seconds)
    metrics = {
        (f"state {name}" if name != "triad" else "triad"): report.metric(
            report.median(values) / 1e9, "GB/s", report.mad(values) / 1e9
        )
        for name, values in rates.items()
    }
    value, spread = report.ratio(rates["by reft"], rates["AdamW, fused"])
    metrics["by reft / AdamW, fused"] = report.metric(
        value, "x", spread, ">= 1", report.at_least(value, spread, 1.0)
    )
    value, spread = report.ratio(rates["by reft"], rates["AdamW"])
    metrics["by reft / AdamW"] = report.metric(value, "x", spread)
    # Reads and writes of the gradients and both means; torch's, of the parameters, too.
    for name, lists in (("by reft", 5), ("AdamW, fused", 7)):
        moved = [rate * lists / 2 for rate in rates[name]]
        value, spread = report.ratio(moved, rates["triad"])
        metrics[f"bytes moved {name} / triad"] = report.metric(value, "x", spread)
    report.write(args.json, "bench adam", metrics)
    return 0


if __name__ == "__main__":
    sys.exit(main())
