"""How many store operations the start and the restore of a large job take, in all and per rank.

    python tests/bench/start_scale.py [--nodes 128] [--local-world 8]

Simulates every rank as a thread on a store that counts (tests/support/start_scale.py). No
operation's time is measured: the figures are counts, and grow linearly with the job.
"""

from __future__ import annotations

import argparse
import sys

from tests.support.start_scale import simulate


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=128)
    parser.add_argument("--local-world", type=int, default=8)
    args = parser.parse_args()
    world = args.nodes * args.local_world
    traffic = simulate(args.nodes, args.local_world)
    print(f"{world} ranks on {args.nodes} nodes, store operations:")
    for name, phase in traffic.items():
        print(
            f"  {name:24} {phase.total:7} in all, {phase.total / world:5.2f} per rank,"
            f" at most {phase.busiest} (rank {phase.busiest_rank});"
            f" {phase.bytes_read / 1e6:.1f} MB read"
        )
    total = sum(phase.total for phase in traffic.values())
    print(f"  {'together':24} {total:7} in all, {total / world:5.2f} per rank")
    return 0


if __name__ == "__main__":
    sys.exit(main())
