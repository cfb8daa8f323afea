"""`reft gc`: vault files of jobs that have ended for good."""

from __future__ import annotations

import fcntl
import os
import re
import stat
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click

from reft._cli import agents, words
from reft._link import folders

_DAY_SEC = 86_400
# What ranks and agents make in the folder of a job; see `agent/peers/vault_files.h`.
_VAULT = re.compile(r"rank-\d{1,7}(-of-\d{1,7})?\.vault(\.new|\.unusable(-\d+)?)?")


@dataclass(frozen=True)
class Folder:
    """The vault files of one job.

    Attributes:
        state: `live` (an agent holds it), `recent` (not older than the limit), `dead` or `removed`.
        days: since an agent or a rank last touched it.
        kept: names in it that reft has not made, for which the folder stays.
    """

    job: str
    path: str
    state: str
    days: float
    bytes: int
    files: int
    kept: list[str]


def _is_own_file(entry: os.DirEntry[str]) -> bool:
    info = entry.stat(follow_symlinks=False)
    return stat.S_ISREG(info.st_mode) and info.st_uid == os.geteuid() and info.st_nlink == 1


def _examine(folder: Path, older_than_sec: float, now: float, delete: bool) -> Folder | None:
    """None: it holds no vault of this user."""
    try:
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        if os.fstat(handle).st_uid != os.geteuid():
            return None
        with os.scandir(handle) as entries:
            found = list(entries)
        vaults = [e for e in found if _VAULT.fullmatch(e.name) and _is_own_file(e)]
        if not vaults:
            return None
        infos = [entry.stat(follow_symlinks=False) for entry in vaults]
        newest = max(os.fstat(handle).st_mtime, *(info.st_mtime for info in infos))
        kept = sorted({entry.name for entry in found} - {entry.name for entry in vaults})
        state = _state(handle, now - newest, older_than_sec)
        if not delete:
            fcntl.flock(handle, fcntl.LOCK_UN)
        if state == "dead" and delete:
            for entry in vaults:
                os.unlink(entry.name, dir_fd=handle)
            state = "removed"
    finally:
        os.close(handle)
    if state == "removed" and not kept:
        folder.rmdir()
    size = sum(info.st_blocks * 512 for info in infos)
    days = round(max(0.0, now - newest) / _DAY_SEC, 2)
    return Folder(folder.name, str(folder), state, days, size, len(vaults), kept)


def _state(handle: int, age_sec: float, older_than_sec: float) -> str:
    """An agent holds a shared lock on the folder as long as it lives. It waits for two seconds for
    the lock that is taken here, and then leaves the files alone."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return "live"
    return "dead" if age_sec >= older_than_sec else "recent"


def examine(vault_dir: Path, older_than_sec: float, now: float, delete: bool) -> list[Folder]:
    """The folders of jobs under `vault_dir`; with `delete`, without those of dead jobs.

    Raises:
        Failure: there is no such directory, or others can write into it.
    """
    if not vault_dir.is_dir():
        raise agents.Failure(f"{vault_dir} is not a directory", agents.EXIT_NOTHING)
    if problem := folders.problem(vault_dir):
        raise agents.Failure(f"{vault_dir} is not safe: {problem}", agents.EXIT_WRONG)
    found = (_examine(path, older_than_sec, now, delete) for path in sorted(vault_dir.iterdir()))
    return [folder for folder in found if folder is not None]


def _print(found: list[Folder], delete: bool) -> None:
    console = words.console()
    for folder in found:
        kept = f"; not made by reft, stays: {', '.join(folder.kept)}" if folder.kept else ""
        console.print(
            f"{folder.state:8} {folder.job}: {folder.files} files, {words.size(folder.bytes)},"
            f" {folder.days:g} days old{kept}",
            soft_wrap=True,
        )
    dead = sum(folder.state == "dead" for folder in found)
    if dead and not delete:
        console.print(f"nothing was deleted; `reft gc --delete` removes {dead} dead jobs")


@click.command("gc")
@click.option(
    "--vault-dir", metavar="DIR", help="Where vault files are. Default: REFT_VAULT_DIR."
)
@click.option(
    "--older-than",
    "days",
    type=click.FloatRange(min=0),
    default=7.0,
    show_default=True,
    metavar="DAYS",
    help="A job is dead if no agent has held its files for this many days.",
)
@click.option("--delete", is_flag=True, help="Delete the files of dead jobs, not only list them.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of text.")
def command(vault_dir: str | None, days: float, delete: bool, as_json: bool) -> None:
    """Lists vault files of jobs that have ended for good, and with --delete removes them.

    Vault files (REFT_VAULT_DIR) outlive a job that did not end cleanly, so that its next start
    finds them. A running agent holds the files of its job; on a file system with locks between
    hosts, other hosts see that, too. --delete removes only files that reft has made for this user.

    --json prints {"vault_dir", "folders": [{job, path, state, days, bytes, files, kept}, ...]};
    state is live, recent, dead or removed. Exit code 3 if there are no vault files.
    """
    given = vault_dir or os.environ.get("REFT_VAULT_DIR", "")
    if not given:
        raise agents.Failure("give --vault-dir, or set REFT_VAULT_DIR", 2)
    found = examine(Path(given), days * _DAY_SEC, time.time(), delete)
    if not found:
        raise agents.Failure(f"no vault files of this user under {given}", agents.EXIT_NOTHING)
    if as_json:
        result: dict[str, Any] = {"vault_dir": given}
        result["folders"] = [asdict(folder) for folder in found]
        agents.print_json(result)
    else:
        _print(found, delete)
