"""What a value of REFT_SNAPSHOT_PROTECTION asks for: what ranks store of each other, and whether
the agents of other nodes keep copies. `auto` asks for nothing until the ranks have chosen.

Threads: any. Errors: none.
"""

from __future__ import annotations

NONE = "none"
PEER = "peer"
AOR = "aor"
AUTO = "auto"


def is_copied(protection: str) -> bool:
    """Whether it asks for copies on another node."""
    return PEER in protection.split("+")


def is_recomputed(protection: str) -> bool:
    """Whether it asks for optimizers to be computed a second time."""
    return AOR in protection.split("+")


def placement(protection: str) -> str:
    """What of it the ranks themselves store. State that is computed on two ranks is replicas'."""
    parts = ("arc" if part == AOR else part for part in protection.split("+"))
    return "+".join(part for part in parts if part not in (PEER, AUTO)) or NONE
