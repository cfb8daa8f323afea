"""What a value of REFT_SNAPSHOT_PROTECTION asks for: what ranks store of each other, and whether
the agents of other nodes keep copies.

Threads: any. Errors: none.
"""

from __future__ import annotations

PEER = "peer"


def is_copied(protection: str) -> bool:
    """Whether it asks for copies on another node."""
    return PEER in protection.split("+")


def placement(protection: str) -> str:
    """What of it the ranks themselves store."""
    return "+".join(part for part in protection.split("+") if part != PEER) or "none"
