"""Somebody else has taken /tmp/reft-<uid>: all processes of the user agree on another place."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from reft._link import folders, job_identity


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path / f"reft-{os.getuid()}"


def test_the_usual_place_is_taken_if_nobody_has_it(shared: Path, tmp_path: Path) -> None:
    env = {"HOME": str(tmp_path / "home")}
    assert job_identity.default_run_dir(env) == shared
    shared.mkdir(mode=0o700)
    assert job_identity.default_run_dir(env) == shared


@pytest.mark.parametrize("how", ["link", "file", "folder of another user"])
def test_a_squatted_place_is_left(shared: Path, tmp_path: Path, how: str) -> None:
    env = {"HOME": str(tmp_path / "home")}
    if how == "link":
        (tmp_path / "trap").mkdir()
        shared.symlink_to(tmp_path / "trap")
    elif how == "file":
        shared.write_text("")
    elif os.geteuid() == 0:
        shared.mkdir()
        os.chown(shared, 65534, 65534)
    else:
        pytest.skip("needs another user")
    own = job_identity.default_run_dir(env)
    assert own.is_relative_to(tmp_path / "home" / ".cache" / "reft")
    own.mkdir(parents=True)
    if how == "folder of another user":
        shared.rmdir()
    else:
        shared.unlink()
    assert job_identity.default_run_dir(env) == own  # running jobs are still found


def test_a_user_without_a_home_is_told_by_the_agent(shared: Path) -> None:
    shared.write_text("")
    assert job_identity.default_run_dir({}) == shared


def test_folders_that_others_may_change_are_named(tmp_path: Path) -> None:
    inner = tmp_path / "open" / "inner"
    inner.mkdir(parents=True)
    assert folders.problem(inner) == ""
    assert folders.problem(inner / "not" / "made") == ""
    inner.parent.chmod(0o777)
    assert "writable by other users" in folders.problem(inner)
    inner.parent.chmod(0o1777)
    assert folders.problem(inner) == ""
    link = tmp_path / "link"
    link.symlink_to(inner)
    inner.parent.chmod(0o777)
    assert "writable by other users" in folders.problem(link)
