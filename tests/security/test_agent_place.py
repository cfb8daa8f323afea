"""The agent's run directory vanishes, is replaced, or was prepared by somebody else."""

from __future__ import annotations

import os
import resource
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


@pytest.mark.parametrize("flooded", [False, True])
def test_a_stopped_agent_is_named_by_the_second(make: Callable[..., Node], flooded: bool) -> None:
    node = make()
    claim = node.claim()
    shutil.rmtree(node.root / "run")
    os.kill(node.pid, signal.SIGSTOP)
    knocks = [socket.socket(socket.AF_UNIX) for _ in range(40 if flooded else 0)]
    for knock in knocks:
        knock.setblocking(False)
        knock.connect_ex(claim)
    try:
        done = node.start()
        assert done.returncode == 1
        assert done.stdout.startswith("failed: another agent of this job")
        assert flooded or str(node.pid) in done.stdout
        assert len(done.stdout.splitlines()) == 1
    finally:
        os.kill(node.pid, signal.SIGCONT)
        for knock in knocks:
            knock.close()
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


def squat(claim: bytes, kind: str) -> list[socket.socket]:
    held = [socket.socket(socket.AF_UNIX)]
    held[0].bind(claim)
    if kind == "bound":
        return held
    held[0].listen(0)
    while kind == "full":
        held.append(socket.socket(socket.AF_UNIX))
        held[-1].setblocking(False)
        if held[-1].connect_ex(claim) != 0:
            break
    return held


@pytest.mark.parametrize("kind", ["listens", "bound", "full"])
def test_somebody_elses_claim_does_not_keep_the_agent_out(
    make: Callable[..., Node], kind: str
) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs another user")
    node = make()
    claim = node.claim()
    os.kill(node.pid, 9)
    wait_for(lambda: not node.alive())
    ready, writer = os.pipe()
    if (pid := os.fork()) == 0:
        os.setuid(65534)
        held = squat(claim, kind)
        os.write(writer, b"1")
        signal.pause()
        os._exit(len(held))
    try:
        assert os.read(ready, 1) == b"1"
        done = node.start()
        assert done.returncode == 0, done
        assert "another user holds this job's claim" in node.log()
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(ready)
        os.close(writer)
    # With the name free, the agent takes the claim after all.
    assert wait_for(node.claim) == claim


def test_an_agent_takes_all_the_address_space_that_it_may(tmp_path: Path) -> None:
    """It maps the vaults of all ranks: what a shell allows one program is too little."""
    node = Node(tmp_path)
    node.arguments = ["prlimit", f"--as={8 << 30}:{1 << 45}", *node.arguments]
    try:
        assert node.start().returncode == 0
        assert resource.prlimit(node.pid, resource.RLIMIT_AS) == (1 << 45, 1 << 45)
    finally:
        if node.pid:
            os.kill(node.pid, 9)
