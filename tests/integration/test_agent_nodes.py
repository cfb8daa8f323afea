"""The agents of a job over several nodes: who looks at a hang, what they ask each other, and what
is said where nobody answers.

The test plays the ranks, which carry what agents say through the job's store, and so all other
nodes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

import pytest

from tests.integration import test_agent
from tests.integration.test_agent import (  # noqa: F401
    INCARNATION,
    Node,
    make,
    protocol,
    put,
    vault_bytes,
    wait_for,
)

pytestmark = test_agent.pytestmark
SECOND = 1_000_000_000


class Carrier:
    """The rank of a node, in a job of two nodes; it waits in an op since `waits_sec`."""

    def __init__(self, node: Node, number: int, waits_sec: float | None = 2.0) -> None:
        self.connection = node.rank(number, local_world=1, local_rank=0)
        age = None if waits_sec is None else int(waits_sec * SECOND)
        put(self.connection, number, vault_bytes(number, pending_op_age_ns=age))

    def until(self, wanted: int) -> dict[str, Any]:
        """The next message of that kind; answers what comes before it."""
        while True:
            kind, message, _ = self.connection.receive()
            if kind == protocol.STACK_REQUEST:
                reply = {"id": message["id"], "rank": 0, "pid": os.getpid(), "text": "", "error": ""}
                self.connection.send(protocol.STACK_REPLY, reply)
            if kind == wanted:
                return message

    def __enter__(self) -> Carrier:
        return self

    def __exit__(self, *_: object) -> None:
        self.connection.close()


def evidence_of_node_one(asks: dict[str, Any]) -> dict[str, Any]:
    """Rank 1 has not begun the op and is stopped. Its clock has nothing to do with ours."""
    now = 77 * SECOND
    rank = {
        "rank": 1,
        "node": 1,
        "pid": 901,
        "host": "other",
        "alive": True,
        "proc_state": "T",
        "ops_begun": 0,
        "tail": [],
    }
    rank |= {"groups": [{"name": "default_pg", "rank": 1, "size": 2}], "heartbeat_age_ns": 2 * SECOND}
    evidence = {"report": "hang", "version": 2, "job": "demo", "node": 1, "now_ns": now, "world": 2, "ranks": [rank]}
    return {
        "id": asks["id"],
        "node": 1,
        "answer": {"node": 1, "asked_ns": now - SECOND // 10, "boot": "b", "evidence": evidence},
    }


def verdicts(node: Node) -> list[dict[str, Any]]:
    return [
        json.loads(p.with_suffix(".json").read_bytes()) for p in sorted((node.directory / "verdicts").glob("*.txt"))
    ]


def test_the_first_node_names_a_rank_of_another(make: Callable[..., Node]) -> None:  # noqa: F811
    node = make(REFT_HANG_SUSPECT_SEC="1")
    with Carrier(node, 0) as carrier:
        asks = carrier.until(protocol.GATHER)
        assert asks["kind"] == "evidence" and asks["seconds"] > 0
        carrier.connection.send(protocol.GATHERED, evidence_of_node_one(asks))
        carrier.connection.send(protocol.GATHERED, {"id": asks["id"], "silent": [], "error": ""})
        (verdict,) = wait_for(lambda: verdicts(node), 30)
        assert [(c["rank"], c["pid"], c["host"]) for c in verdict["culprits"]] == [(1, 901, "other")], node.log()
        assert verdict["class"] == "stopped" and verdict["silent_nodes"] == []
        assert 1.5 < verdict["detected_after_sec"] < 60
        # From now on the other nodes are told that it is looked after.
        assert carrier.until(protocol.GATHER)["kind"] == "hold"


def test_a_silent_node_is_listed_and_asked_again(make: Callable[..., Node]) -> None:  # noqa: F811
    node = make(REFT_HANG_SUSPECT_SEC="1")
    with Carrier(node, 0) as carrier:
        asks = carrier.until(protocol.GATHER)
        carrier.connection.send(protocol.GATHERED, {"id": asks["id"], "silent": [1], "error": ""})
        (verdict,) = wait_for(lambda: verdicts(node), 30)
        assert verdict["silent_nodes"] == [1] and verdict["confidence"] == "undecidable" and verdict["culprits"] == []
        while (asks := carrier.until(protocol.GATHER))["kind"] != "evidence":
            pass
        carrier.connection.send(protocol.GATHERED, evidence_of_node_one(asks))
        carrier.connection.send(protocol.GATHERED, {"id": asks["id"], "silent": [], "error": ""})
        wait_for(lambda: len(verdicts(node)) == 2, 30)
        assert [c["rank"] for c in verdicts(node)[1]["culprits"]] == [1]


def test_a_rank_that_does_not_come_back_with_evidence_is_told(make: Callable[..., Node]) -> None:  # noqa: F811
    node = make(REFT_HANG_SUSPECT_SEC="1")
    with Carrier(node, 0) as carrier:
        assert carrier.until(protocol.GATHER)["kind"] == "evidence"
        (verdict,) = wait_for(lambda: verdicts(node), 60)
        assert verdict["silent_nodes"] == [1]
        assert "did not come back" in verdict["nodes_problem"] and "did not come back" in verdict["text"]


def test_another_node_asks_the_first_to_look_and_then_looks_itself(make: Callable[..., Node]) -> None:  # noqa: F811
    node = make(REFT_HANG_SUSPECT_SEC="1", node=1)
    with Carrier(node, 1) as carrier:
        assert carrier.until(protocol.GATHER)["kind"] == "please"
        assert not verdicts(node)
        asks = carrier.until(protocol.GATHER)
        assert asks["kind"] == "evidence"
        carrier.connection.send(protocol.GATHERED, {"id": asks["id"], "silent": [0], "error": ""})
        (verdict,) = wait_for(lambda: verdicts(node), 30)
        assert verdict["node"] == 1 and verdict["silent_nodes"] == [0]


def test_another_node_gives_its_evidence_and_leaves_the_verdict_to_the_first(make: Callable[..., Node]) -> None:  # noqa: F811
    node = make(REFT_HANG_SUSPECT_SEC="1", node=1)
    with Carrier(node, 1) as carrier:
        carrier.connection.send(protocol.EVIDENCE_REQUEST, {"id": 5, "node": 0, "kind": "evidence"})
        answer = carrier.until(protocol.EVIDENCE)
        assert answer["id"] == 5 and answer["answer"]["node"] == 1
        (rank,) = answer["answer"]["evidence"]["ranks"]
        assert (rank["rank"], rank["node"], rank["pid"], rank["answered"]) == (1, 1, os.getpid(), True)
        assert len(rank["tail"]) == 1
        carrier.connection.send(protocol.EVIDENCE_REQUEST, {"id": 6, "node": 0, "kind": "hold"})
        node.wait_ticks(16)  # four times what makes it suspicious
        assert not verdicts(node), node.log()


def test_the_first_node_looks_when_another_asks_it_to(make: Callable[..., Node]) -> None:  # noqa: F811
    node = make(REFT_HANG_SUSPECT_SEC="1")
    with Carrier(node, 0, waits_sec=None) as carrier:  # no rank here waits, so nothing looks hung
        carrier.connection.send(protocol.EVIDENCE_REQUEST, {"id": 5, "node": 1, "kind": "please"})
        assert carrier.until(protocol.GATHER)["kind"] == "evidence"


@pytest.mark.parametrize("message", [{"id": 0, "node": 1, "kind": "hold"}, {"id": 1, "node": 1, "kind": "king"}, {}])
def test_a_request_that_is_none_ends_the_connection(make: Callable[..., Node], message: dict[str, Any]) -> None:  # noqa: F811
    node = make()
    with Carrier(node, 0) as carrier:
        carrier.connection.send(protocol.EVIDENCE_REQUEST, message)
        assert carrier.until(protocol.ERROR)["what"]


HALF = {"local_world": 2, "world": 4}  # of a job on two nodes
KEEP = {"key": "ab" * 32, "address": "127.0.0.1", "port": 0, "tls": 0, "sources": [], "on_demand": 0, "room": 0, "rate": 0}  # fmt: skip


def next_of(connection: protocol.AgentConnection, wanted: int) -> dict[str, Any]:
    """The next message of a rank, of that kind."""
    kind, message, _ = connection.receive()
    assert kind == wanted, (kind, message)
    return message


def test_votes_that_came_before_their_copies_were_asked_for_wait_and_the_terminal_says_so(
    make: Callable[..., Node],  # noqa: F811
) -> None:
    """No node takes copies. The first rank of a node asks for them, and others may have voted by then."""
    node = make()
    with node.rank(0, **HALF) as first, node.rank(1, **HALF) as second:
        second.vote(1, INCARNATION, True)
        node.settle()
        first.send(protocol.MESH_KEEP, KEEP | {"copied": [1]})
        first.vote(1, INCARNATION, True)
        assert first.request(protocol.STATUS_REQUEST)[0] == protocol.STATUS, "the vote of rank 1 waits"
        second.vote(2, INCARNATION, True)  # training is a step further
        text = next_of(first, protocol.VERDICT)["text"]
        assert text.startswith("reft: warning: copies of node 0's snapshots are not on another node yet"), text
        node.clock.advance(11)
        assert next_of(first, protocol.NODE_VOTE)["step"] == 1
        text = next_of(first, protocol.VERDICT)["text"]
        assert "copies of node 0's snapshots do not reach another node" in text, text
        first.send(protocol.JOB_OUTCOME, protocol.BALLOT.pack(1, INCARNATION, 0, 0, 1, 0, 0))
        assert next_of(first, protocol.OUTCOME)["yes"]
        second.vote(3, INCARNATION, False)
        assert next_of(first, protocol.NODE_VOTE)["step"] == 3, "nothing was said of an end of the warning"


def test_a_vote_for_a_step_that_was_aborted_already_waits_for_no_copy(
    make: Callable[..., Node],  # noqa: F811
) -> None:
    """A rank may seal a step after another one has dropped it and the job has aborted it."""
    node = make()
    with node.rank(0, **HALF) as first, node.rank(1, **HALF) as second:
        first.send(protocol.MESH_KEEP, KEEP | {"copied": [0]})
        second.vote(1, INCARNATION, False)
        assert next_of(first, protocol.NODE_VOTE)["step"] == 1
        first.send(protocol.JOB_OUTCOME, protocol.BALLOT.pack(1, INCARNATION, 0, 0, 0, 0, 0))
        assert not next_of(first, protocol.OUTCOME)["yes"]
        first.vote(1, INCARNATION, True)
        answer = next_of(first, protocol.OUTCOME)
        assert (answer["step"], answer["yes"]) == (1, 0)
        first.vote(2, INCARNATION, False)
        assert next_of(first, protocol.NODE_VOTE)["step"] == 2, "no vote waits behind it"
