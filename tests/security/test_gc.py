"""`reft gc` deletes what reft has made, of this user and of jobs that have ended for good, and
nothing else."""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from reft._cli import gc

OLD = 1_000_000_000


def job(root: Path, name: str, *, seconds: float = OLD) -> Path:
    folder = root / name
    folder.mkdir(mode=0o700)
    for file in ("rank-0.vault", "rank-1-of-4.vault", "rank-2.vault.unusable-2", "rank-3.vault.new"):
        (folder / file).write_bytes(bytes(8192))
        os.utime(folder / file, (seconds, seconds))
    os.utime(folder, (seconds, seconds))
    return folder


def run(root: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    result = CliRunner().invoke(gc.command, ["--vault-dir", str(root), "--json", *arguments])
    return result.exit_code, json.loads(result.output)


def states(root: Path, *arguments: str) -> dict[str, str]:
    return {entry["job"]: entry["state"] for entry in run(root, *arguments)[1]["folders"]}


def finds_nothing(root: Path, *arguments: str) -> None:
    """Exit code and message are the same in both forms."""
    code, report = run(root, *arguments)
    assert code == 3 and report == {"error": f"no vault files of this user under {root}"}
    text = CliRunner().invoke(gc.command, ["--vault-dir", str(root), *arguments])
    assert text.exit_code == 3 and text.stderr == f"reft: {report['error']}\n"


def test_an_empty_directory_is_nothing_found(tmp_path: Path) -> None:
    finds_nothing(tmp_path)


def test_lists_without_deleting(tmp_path: Path) -> None:
    folder = job(tmp_path, "old")
    code, report = run(tmp_path)
    (entry,) = report["folders"]
    assert (code, entry["state"], entry["files"], entry["kept"]) == (0, "dead", 4, [])
    assert len(list(folder.iterdir())) == 4


def test_deletes_dead_jobs_alone(tmp_path: Path) -> None:
    old = job(tmp_path, "old")
    fresh = job(tmp_path, "fresh", seconds=OLD)
    os.utime(fresh)  # an agent was here
    live = job(tmp_path, "live")
    holder = os.open(live, os.O_RDONLY)
    fcntl.flock(holder, fcntl.LOCK_SH)
    assert states(tmp_path, "--delete") == {"old": "removed", "fresh": "recent", "live": "live"}
    assert not old.exists() and len(list(fresh.iterdir())) == len(list(live.iterdir())) == 4
    os.close(holder)
    assert states(tmp_path, "--delete", "--older-than", "0") == {"fresh": "removed", "live": "removed"}


def test_what_reft_has_not_made_stays(tmp_path: Path) -> None:
    folder = job(tmp_path, "old")
    (folder / "notes.txt").write_text("mine")
    target = tmp_path / "target"
    target.write_text("mine")
    (folder / "rank-7.vault").symlink_to(target)
    os.link(target, folder / "rank-8.vault")
    os.utime(folder, (OLD, OLD))
    (entry,) = run(tmp_path, "--delete")[1]["folders"]
    assert entry["kept"] == ["notes.txt", "rank-7.vault", "rank-8.vault"]
    assert sorted(path.name for path in folder.iterdir()) == entry["kept"]
    assert target.read_text() == "mine"


def test_linked_folders_are_not_entered(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    folder = job(elsewhere, "old")
    root = tmp_path / "vaults"
    root.mkdir()
    (root / "old").symlink_to(folder)
    finds_nothing(root, "--delete")
    assert len(list(folder.iterdir())) == 4


def test_a_directory_that_others_may_change_is_refused(tmp_path: Path) -> None:
    job(tmp_path, "old")
    tmp_path.chmod(0o777)
    code, report = run(tmp_path, "--delete")
    assert code == 1 and "writable by other users" in report["error"]


@pytest.mark.skipif(os.geteuid() != 0, reason="needs another user")
def test_another_users_files_are_left_alone(tmp_path: Path) -> None:
    folder = job(tmp_path, "old")
    for path in (*folder.iterdir(), folder):
        os.chown(path, 65534, 65534)
    finds_nothing(tmp_path, "--delete")
