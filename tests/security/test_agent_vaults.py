"""Vaults that cannot be mapped, are cut off, are not what they should be, or go to others."""

from __future__ import annotations

import fcntl
import os
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.integration import test_agent
from tests.integration.test_agent import (
    INCARNATION,
    Node,
    memfd,
    protocol,
    put,
    vault_bytes,
    wait_for,
)

pytestmark = test_agent.pytestmark
GIB = 1 << 30


def listed(node: Node) -> list[int]:
    with node.tool() as tool:
        return [vault["rank"] for vault in tool.request(protocol.VAULT_LIST)[1]["vaults"]]


def without_room_for(node: Node, bytes_: int) -> tuple[int, int]:
    """Limits the agent's address space so that no map of so many bytes succeeds."""
    pages = int(Path(f"/proc/{node.pid}/statm").read_text().split()[0])
    before = resource.prlimit(node.pid, resource.RLIMIT_AS)
    limit = pages * resource.getpagesize() + bytes_ // 2
    resource.prlimit(node.pid, resource.RLIMIT_AS, (limit, before[1]))
    return before


@pytest.mark.parametrize("when", ["handed over", "grown"])
def test_a_vault_that_cannot_be_mapped_now_is_kept(make: Callable[..., Node], when: str) -> None:
    node = make()
    fd = memfd(vault_bytes(0))
    with node.rank(0, world=1) as rank:
        if when == "handed over":
            os.ftruncate(fd, GIB)
            limits = without_room_for(node, GIB)
        rank.send(protocol.VAULT_PUT, {"rank": 0, "bytes": 0}, fd)
        assert rank.receive()[0] == protocol.VAULT_ACK
        if when == "grown":
            os.ftruncate(fd, GIB)
            limits = without_room_for(node, GIB)
        assert listed(node) == []
        resource.prlimit(node.pid, resource.RLIMIT_AS, limits)
        assert listed(node) == [0]
    assert node.log().count("cannot be mapped now") == 1
    os.close(fd)


def private(folder: Path) -> Path:
    folder.mkdir(parents=True)
    for part in (folder.parent, folder):
        part.chmod(0o700)
    return folder


def vault_file(folder: Path, rank: int, **fields: Any) -> Path:
    path = folder / f"rank-{rank}.vault"
    path.write_bytes(vault_bytes(rank, **fields))
    path.chmod(0o600)
    return path


def test_no_step_counts_whose_vault_was_cut_off(make: Callable[..., Node], tmp_path: Path) -> None:
    folder = private(tmp_path / "vaults" / "demo")
    node = make(REFT_VAULT_DIR=str(folder.parent))
    path = vault_file(folder, 0, world=1)
    with node.rank(0, world=1) as rank, path.open("r+b") as file:
        rank.send(protocol.VAULT_PUT, {"rank": 0, "bytes": 0}, file.fileno())
        assert rank.receive()[0] == protocol.VAULT_ACK
        rank.vote(4, INCARNATION, True)
        assert rank.receive()[1]["yes"]
        file.truncate(4096)
        assert listed(node) == []
        rank.vote(5, INCARNATION, True)
        assert not rank.receive()[1]["yes"]
    assert node.alive()


@pytest.mark.parametrize("kind", ["link", "two names", "open", "another user's"])
def test_a_foreign_vault_file_is_left_alone(make: Callable[..., Node], tmp_path: Path, kind: str) -> None:
    folder = private(tmp_path / "vaults" / "demo")
    vault_file(folder, 1)
    path = vault_file(folder, 0)
    if kind == "link":
        path.symlink_to(path.rename(tmp_path / "elsewhere"))
    elif kind == "two names":
        os.link(path, tmp_path / "second name")
    elif kind == "open":
        path.chmod(0o644)
    elif os.geteuid() == 0:
        os.chown(path, 65534, 65534)
    else:
        pytest.skip("needs another user")
    node = make(REFT_VAULT_DIR=str(folder.parent))
    assert listed(node) == [1]
    assert node.log().count("is left alone") == 1


def test_a_vault_folder_that_others_may_change_is_left_alone(make: Callable[..., Node], tmp_path: Path) -> None:
    folder = private(tmp_path / "vaults" / "demo")
    vault_file(folder, 0)
    folder.chmod(0o777)
    node = make(REFT_VAULT_DIR=str(folder.parent))
    assert listed(node) == []
    assert node.log().count("writable by other users") == 1


def test_a_living_agent_holds_its_vault_folder(make: Callable[..., Node], tmp_path: Path) -> None:
    folder = private(tmp_path / "vaults" / "demo")
    vault_file(folder, 0)
    os.utime(folder, (0, 0))
    node = make(REFT_VAULT_DIR=str(folder.parent))
    wait_for(lambda: folder.stat().st_mtime > 1e9)  # `reft gc` sees when the job was last there
    handle = os.open(folder, os.O_RDONLY)
    with pytest.raises(BlockingIOError):
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.kill(node.pid, 9)
    wait_for(lambda: not node.alive())
    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(handle)


def test_an_agent_that_starts_while_the_folder_is_looked_at_holds_it_all_the_same(
    make: Callable[..., Node], tmp_path: Path
) -> None:
    folder = private(tmp_path / "vaults" / "demo")
    vault_file(folder, 0)
    looks = os.open(folder, os.O_RDONLY)
    fcntl.flock(looks, fcntl.LOCK_EX)
    node = make(REFT_VAULT_DIR=str(folder.parent))
    os.close(looks)
    handle = os.open(folder, os.O_RDONLY)

    def is_held() -> bool:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        fcntl.flock(handle, fcntl.LOCK_UN)
        return False

    wait_for(is_held)
    os.close(handle)
    assert node.alive()


def test_tools_get_vaults_to_read_only(make: Callable[..., Node]) -> None:
    node = make()
    with node.rank(0) as rank, node.rank(1) as other, node.tool() as tool:
        put(rank, 0, vault_bytes(0))
        for connection, writable in ((rank, True), (other, False), (tool, False)):
            fd = connection.request(protocol.VAULT_GET, {"rank": 0})[2]
            assert fd is not None
            mode = fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE
            assert mode == (os.O_RDWR if writable else os.O_RDONLY)
            os.close(fd)


def test_core_dumps_leave_vaults_out(make: Callable[..., Node]) -> None:
    node = make()
    with node.rank(0) as rank:
        put(rank, 0, vault_bytes(0))
        text = Path(f"/proc/{node.pid}/smaps").read_text()
        flags = text[text.index("memfd:vault") :].split("VmFlags:", 1)[1].split("\n", 1)[0].split()
        assert "dd" in flags
