"""Ranks whose process id means another process to the agent."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.integration import test_agent
from tests.integration.test_agent import Node, protocol, wait_for

pytestmark = test_agent.pytestmark


def may_unshare() -> bool:
    return subprocess.run(["unshare", "--pid", "--fork", "true"], capture_output=True, check=False).returncode == 0


@pytest.fixture
def apart(tmp_path: Path) -> Iterator[Node]:
    """An agent in a PID namespace of its own, from which this process is not visible."""
    if not may_unshare():
        pytest.skip("cannot make PID namespaces")
    node = Node(tmp_path)
    command = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", *node.arguments, "--foreground"]
    with subprocess.Popen(command, env=node.environment, stderr=subprocess.DEVNULL) as agent:
        try:
            wait_for(node.socket.exists)
            yield node
        finally:
            agent.kill()


RANK = textwrap.dedent(
    """
    import sys, time
    from reft._link import agent_protocol as p
    hello = {'role': 'rank', 'rank': 0, 'local_rank': 0, 'world': 1, 'local_world': 1, 'incarnation': '7', 'attempt': 0,
             'pid': 1}
    connection = p.AgentConnection(sys.argv[1], hello)
    print('in', flush=True)
    time.sleep(600)
    """
)


def test_a_rank_of_another_namespace_is_watched_by_its_own_end(apart: Node) -> None:
    """It calls itself process 1, which to the agent is the agent."""
    environment = {**os.environ, "PYTHONPATH": str(Path(protocol.__file__).parents[2])}
    with subprocess.Popen(
        [sys.executable, "-c", RANK, str(apart.socket)], env=environment, stdout=subprocess.PIPE, text=True
    ) as rank:
        assert rank.stdout is not None and rank.stdout.readline() == "in\n"
        (state,) = apart.status()["ranks"]
        assert state["alive"] and state["pid"] == 1
        with apart.tool() as tool:  # no stacks, rather than the agent's
            answer = tool.request(protocol.STACKS_REQUEST, {"ranks": [0], "native": True})[1]
            assert "another PID namespace" in answer["error"]
        rank.kill()
        rank.wait()
        wait_for(lambda: not apart.status()["ranks"][0]["alive"])


def test_without_a_process_the_connection_decides(make: Callable[..., Node]) -> None:
    """A hello that says another process began than the one that the kernel names is still watched:
    by the kernel's name where it has one."""
    node = make()
    with node.rank(0, world=1, started=1):
        (state,) = node.status()["ranks"]
        assert state["alive"] and state["pid"] == os.getpid()
