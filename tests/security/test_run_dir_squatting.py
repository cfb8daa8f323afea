"""Somebody else has taken /tmp/reft-<uid>: all processes of the user agree on another place."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from reft._link import folders, job_identity


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path / f"reft-{os.getuid()}"


@pytest.fixture
def group_umask() -> Iterator[None]:
    before = os.umask(0o002)
    yield
    os.umask(before)


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


def test_missing_folders_are_made_for_their_owner_alone(tmp_path: Path, group_umask: None) -> None:
    """A umask of 002 is the default of many systems: `Path.mkdir` makes parents that the user's
    group can write to, which the next rank then refuses."""
    inner = tmp_path / "a" / "b" / "run"
    folders.make_private(inner)
    for part in (inner, inner.parent, inner.parent.parent):
        assert part.stat().st_mode & 0o777 == 0o700
    folders.make_private(inner)  # it is there
    folders.make_private(Path("/proc/self"))
    assert folders.problem(inner) == ""


def test_ranks_that_make_a_folder_at_one_time_all_find_it_safe(
    tmp_path: Path, group_umask: None
) -> None:
    def make(inner: Path) -> str:
        folders.make_private(inner)
        return folders.problem(inner)

    deep = [tmp_path / str(number) / "a" / "b" / "c" for number in range(20) for _ in range(8)]
    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(make, deep)) == {""}


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for place in (tmp_path / "file", tmp_path / "file" / "inner", Path("/proc/nowhere/inner")):
        with pytest.raises(OSError):
            folders.make_private(place)
