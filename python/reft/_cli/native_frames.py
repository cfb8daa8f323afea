"""Native and Python frames as one stack, from the agent of a job, as text."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

from reft._cli import agents
from reft._link import agent_protocol as protocol

_AT_ONCE = 8  # an agent starts a process for each
_MAX_NAME = 200  # of a C++ function

LEGEND = "newest call first, ~ marks native frames"


def add_to(report: dict[str, Any], agent: agents.Agent) -> bool:
    """Puts `native` into each rank of an agent's report; False if no rank has native frames."""
    ranks = [rank for rank in report.get("ranks", []) if isinstance(rank, dict)]
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        for rank, found in zip(
            ranks, pool.map(lambda rank: _of_rank(rank, agent), ranks), strict=True
        ):
            rank["native"] = found
    return not ranks or any(rank["native"]["threads"] for rank in ranks)


def _of_rank(rank: dict[str, Any], agent: agents.Agent) -> dict[str, Any]:
    if not rank.get("alive"):
        return {"threads": [], "error": "the rank has ended"}
    try:
        answer, _ = agent.ask(protocol.STACKS_REQUEST, {"ranks": [rank["rank"]], "native": True})
    except agents.Failure as failure:
        return {"threads": [], "error": failure.message}
    if isinstance(answer.get("native"), dict):
        return dict(answer["native"])
    return {
        "threads": [],
        "error": str(answer.get("error") or "the version of its agent has no native frames"),
    }


def lines_of_ranks(report: dict[str, Any]) -> list[str]:
    """The native frames of the ranks of a report, to be read after its text."""
    lines: list[str] = []
    for rank in report.get("ranks", []):
        native = rank["native"]
        lines += ["", f"rank {rank['rank']} (process {rank['pid']}), {LEGEND}"]
        if native["error"]:
            lines.append(f"  {native['error']}")
        for thread in native["threads"]:
            lines += lines_of_thread(thread)
    return lines


def gil_of(thread: dict[str, Any]) -> str:
    """What is known of a thread and the GIL, for its heading."""
    return (
        ", holds the GIL"
        if thread.get("holds_gil")
        else ", waits for the GIL"
        if thread.get("awaits_gil_of")
        else ""
    )


def lines_of_thread(thread: dict[str, Any]) -> list[str]:
    kind = "main thread" if thread["main"] else "thread"
    lines = [
        f"{kind} {thread['tid']} {thread['name']} ({thread['state']}){gil_of(thread)}"
    ]
    lines += ["  " + _line_of(frame) for frame in thread["frames"]]
    if not thread["frames"]:
        lines.append("  (no frames)")
    if thread["problem"]:
        lines.append(f"  <{thread['problem']}>")
    return lines


def _line_of(frame: dict[str, Any]) -> str:
    if frame["kind"] == "python":
        return f"{frame['file']}:{frame['line'] or '?'} {frame['function']}"
    name: str = frame["function"]
    where = frame["object"].rsplit("/", 1)[-1]
    if not name:
        return f"~ {where or 'anonymous memory'}+{frame['offset']}"
    if len(name) > _MAX_NAME:
        name = name[:_MAX_NAME] + "..."
    return f"~ {name} ({where})"
