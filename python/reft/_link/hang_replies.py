"""Stacks of this rank for the agent, and what the agent says about a hang."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from reft import _C


def install(client: _C.AgentClient, rank: int, device_marks: bool = False) -> None:
    """Lets the agent ask this process where its threads stand, even when the GIL is never free
    again.

    Its verdict on a hang is printed on standard error, and with REFT_HANG_ACTION=abort it may end
    this process. Call on the main thread, once per client. This takes a free real-time signal, with
    which an abort parks the main thread.

    Args:
        client: the rank's connection to its agent.
        rank: global rank, repeated in the answers.
        device_marks: whether streams say where ops stand on their device, for the answers
            (REFT_HANG_DEVICE_MARKS).
    """
    from reft import _C

    _C.install_verdict_notices(client)
    _C.install_stack_replies(client, rank, device_marks)
