"""The agent's run directory vanishes, is replaced, or was prepared by somebody else."""

from __future__ import annotations

import os
import shutil
import signal
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.integration import test_agent
from tests.integration.test_agent import (
    INCARNATION,
    Node,
    protocol,
    put,
    vault_bytes,
    wait_for,
)

pytestmark = test_agent.pytestmark


def answers(node: Node) -> int:
    """Process id of the agent that a tool finds now; 0: none."""
    try:
        with node.tool() as tool:
            return int(tool.welcome["agent_pid"])
    except OSError:
        return 0


def take_away(node: Node, how: str) -> None:
    run = node.root / "run"
    if how == "removed":
        shutil.rmtree(run)
    elif how == "replaced":
        run.rename(node.root / "old")
        (run / node.job / "node-0").mkdir(parents=True)
        for folder in (run, run / node.job, node.directory):
            folder.chmod(0o700)
    else:
        node.socket.unlink()


@pytest.mark.parametrize("how", ["removed", "replaced", "socket"])
def test_an_agent_that_lost_its_directory_makes_it_anew(make: Callable[..., Node], how: str) -> None:
    node = make()
    with node.rank(0) as first, node.rank(1) as second:
        put(first, 0, vault_bytes(0))
        take_away(node, how)
        assert wait_for(lambda: answers(node)) == node.pid
        with node.tool() as tool:
            assert [v["rank"] for v in tool.request(protocol.VAULT_LIST)[1]["vaults"]] == [0]
        for rank in (first, second):
            rank.vote(3, INCARNATION, True)
        assert first.receive()[1]["yes"] and second.receive()[1]["yes"]
    assert "recreated it" in node.log()
    os.kill(node.pid, 15)
    wait_for(lambda: not node.alive())
    assert not node.directory.exists()


def test_a_second_agent_hands_over_to_the_one_whose_directory_is_gone(make: Callable[..., Node]) -> None:
    node = make()
    first = node.pid
    for _ in range(3):
        shutil.rmtree(node.root / "run")
        done = node.start()  # at once: the first agent has not noticed by itself
        assert done.returncode == 0 and done.stdout.startswith("already listening"), done
        assert node.pid == first


def test_a_stopped_agent_is_named_by_the_second(make: Callable[..., Node]) -> None:
    node = make()
    shutil.rmtree(node.root / "run")
    os.kill(node.pid, signal.SIGSTOP)
    try:
        done = node.start()
        assert done.returncode == 1
        assert done.stdout.startswith("failed: ") and str(node.pid) in done.stdout
        assert len(done.stdout.splitlines()) == 1
    finally:
        os.kill(node.pid, signal.SIGCONT)
    assert wait_for(lambda: answers(node)) == node.pid


def test_the_end_of_an_agent_removes_nothing_of_another_directory(make: Callable[..., Node]) -> None:
    node = make()
    take_away(node, "replaced")
    (node.directory / "notes").write_text("mine")
    wait_for(lambda: answers(node))
    os.kill(node.pid, 15)
    wait_for(lambda: not node.alive())
    assert [path.name for path in node.directory.iterdir()] == ["notes"]


def test_each_agent_of_a_place_has_a_greater_number(make: Callable[..., Node]) -> None:
    node = make()
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    lock = node.directory / "agent.lock"
    assert lock.read_text() == f"fence 1 pid {node.pid} boot {boot}\n"
    os.kill(node.pid, 9)
    wait_for(lambda: not node.alive())
    assert node.start().returncode == 0
    assert lock.read_text() == f"fence 2 pid {node.pid} boot {boot}\n"


def test_a_path_that_others_may_change_is_refused(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    done = Node(shared).start()
    assert done.returncode == 1
    assert "writable by other users" in done.stdout and len(done.stdout.splitlines()) == 1


@pytest.mark.parametrize("name", ["agent.lock", "agent.log"])
def test_links_in_the_directory_are_not_followed(tmp_path: Path, name: str) -> None:
    node = Node(tmp_path)
    node.directory.mkdir(parents=True)
    for folder in (node.root / "run", node.directory.parent, node.directory):
        folder.chmod(0o700)
    victim = tmp_path / "victim"
    victim.write_text("keep")
    (node.directory / name).symlink_to(victim)
    done = node.start()
    assert victim.read_text() == "keep"
    if done.returncode == 0:
        os.kill(node.pid, 15)
        wait_for(lambda: not node.alive())
        assert victim.read_text() == "keep"


def test_somebody_elses_claim_does_not_keep_the_agent_out(make: Callable[..., Node]) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs another user")
    node = make()
    table = Path("/proc/net/unix").read_text().splitlines()
    before = {line.split()[-1] for line in table if "@reft-agent-" in line}
    os.kill(node.pid, 9)
    wait_for(lambda: not node.alive())
    table = Path("/proc/net/unix").read_text().splitlines()
    names = before - {line.split()[-1] for line in table}
    assert names
    ready, writer = os.pipe()
    if (pid := os.fork()) == 0:
        os.setuid(65534)
        held = [socket.socket(socket.AF_UNIX) for _ in names]
        for claim, name in zip(held, names, strict=True):
            claim.bind("\0" + name[1:])
            claim.listen()
        os.write(writer, b"1")
        signal.pause()
        os._exit(0)
    try:
        assert os.read(ready, 1) == b"1"
        assert node.start().returncode == 0
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(ready)
        os.close(writer)
