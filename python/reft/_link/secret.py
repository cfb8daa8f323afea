"""The job's secret: only ranks of the job have it, so that they can tell each other's
values in the job's store from those of others.

Rank 0 makes it, or reads it from REFT_JOB_SECRET_FILE, and keeps it in a file that only this user
can read: `<run directory>/secrets/<name>`, and unless all ranks are known to be on one host also
`~/.reft/secrets/<name>`. The other ranks find it there, and know it by an id that rank 0 publishes
in the store. It is never in arguments, nor in the environment.

Where a rank finds no such file, the job trains without reft. With REFT_JOB_SECRET=store, rank 0
hands the secret out through the store and warns: a process that reads or writes there at that
moment can pose as a rank. A rank that has REFT_JOB_SECRET_FILE takes no other.

Threads: the training thread. Errors: `Refused`; what the store raises.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import re
import secrets
import stat
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from reft import _C, _voice
from reft._link import folders, launch
from reft._link.job_identity import default_run_dir, digest
from reft._link.trusted_store import AGENT, TrustedStore, Untrusted

FILE, WAY = "REFT_JOB_SECRET_FILE", "REFT_JOB_SECRET"

_BYTES = 32
_MOST_BYTES = 4096  # of a file that the user has made
_KEPT_SEC = 30 * 86400.0  # files of jobs that no rank has started since
_MOST_FILES = 4096  # that one start looks at
_HANDED_SEC = 60.0  # how long a rank without a file waits for rank 0
_OWN_NAME = re.compile(r"[0-9a-f]{32}|\.[0-9a-f]{16}")  # of files that `_keep` makes
_ID = re.compile(r"([0-9a-f]{32}) ([0-9a-f]{64})")
_NONE, _GO = "none", "go"
_GIVEN = "0" * 32  # name of one that is the user's file


class Refused(RuntimeError):
    """There is no secret that all ranks have, so they train without reft.

    Attributes:
        to_say: whether it is for this rank to say so.
        store: by which the other ranks can be told; None if they know, or cannot be.
    """

    def __init__(self, text: str, to_say: bool, store: TrustedStore | None = None) -> None:
        super().__init__(text)
        self.to_say, self.store = to_say, store


@dataclass(frozen=True)
class Secret:
    """Attributes:
    value: 32 bytes.
    name: of its file, 32 hexadecimal digits.
    """

    value: bytes
    name: str

    def id(self, attempt: str) -> str:
        """Distinguishes it from other secrets, and reveals nothing of it."""
        return self._mac("id", attempt)

    def proof(self, rank: int, question: str, attempt: str) -> str:
        """Shows rank `rank`, which has drawn `question` for it, that rank 0 of this job has drawn
        `attempt` in answer."""
        return self._mac("attempt", f"{rank} {question} {attempt}")

    def _mac(self, purpose: str, text: str) -> str:
        return hmac.new(self.value, f"reft {purpose} {text}".encode(), hashlib.sha256).hexdigest()

    def store(self, raw: Any, attempt: str, world: int) -> TrustedStore:
        """The store of an attempt.

        Args:
            raw: keys that no other attempt sees.
        """
        return TrustedStore(
            raw,
            _C.ValueSeal(self.value, attempt, world),
            _C.ValueSeal(self.value, "all attempts", 0),
            "" if self.name == _GIVEN else self.name,
            bytes.fromhex(self._mac("mesh", "")),
        )


@dataclass(frozen=True)
class Attempt:
    """What a rank knows of this start of the job before it knows the secret.

    Attributes:
        number: that rank 0 has drawn.
        question, proof: what this rank has asked, and what `Secret.proof` answers; "" on rank 0.
        secret: rank 0's; None on others, and if there is none.
        fault: why rank 0 has none, else "".
    """

    number: str
    question: str = ""
    proof: str = ""
    secret: Secret | None = None
    fault: str = ""

    @property
    def prefix(self) -> str:
        """Of the keys of this attempt."""
        return f"reft/{self.number}/"


# -- files


def of_rank_0(env: Mapping[str, str]) -> Secret:
    """Finds or makes the secret.

    Raises:
        Refused: the file that the user has named cannot be used.
    """
    if path := env.get(FILE):
        try:
            return Secret(given(Path(path)), _GIVEN)
        except OSError as error:
            raise Refused(f"{FILE}: {error}", True) from error
    name = _name(env)
    for folder in _folders(env):
        with contextlib.suppress(OSError, ValueError):
            return Secret(_kept(folder, name), name)
    value = secrets.token_bytes(_BYTES)
    is_kept, why = False, ""
    for folder in _folders(env):
        try:
            value = _keep(folder, name, value)
            is_kept = True
        except (OSError, ValueError) as error:
            why = why or f"the job's secret cannot be kept in {folder}: {error}"
    if not is_kept and not _may_hand(env) and env.get("WORLD_SIZE") != "1":
        raise Refused(why or "REFT_RUN_DIR is no absolute path", True)
    return Secret(value, name)


def _found(env: Mapping[str, str], name: str, wanted: str, attempt: str) -> Secret | None:
    """The secret of that id.

    Raises:
        Refused: the user has named a file, and it is not that.
    """
    if path := env.get(FILE):
        try:
            secret = Secret(given(Path(path)), name)
        except OSError as error:
            raise Refused(f"{FILE}: {error}", True) from error
        if not hmac.compare_digest(secret.id(attempt), wanted):
            raise Refused(f"{FILE}: {path} does not hold what rank 0 has", True)
        return secret
    for folder in _folders(env):
        with contextlib.suppress(OSError, ValueError):
            secret = Secret(_kept(folder, name), name)
            if hmac.compare_digest(secret.id(attempt), wanted):
                return secret
    return None


def given(path: Path) -> bytes:
    """The secret in a file that the user has made: 32 to 4096 bytes, best from `head -c 32
    /dev/urandom`. It may be a link, as secrets in Kubernetes are.

    Raises:
        OSError: it cannot be read, others can read it, or it is too short or too long.
    """
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        found = os.fstat(file)
        # Files of root that only the job's group can read: secrets with an fsGroup.
        others = 0o037 if found.st_uid == 0 else 0o077
        if not stat.S_ISREG(found.st_mode):
            raise OSError(f"{path} is not a regular file")
        if found.st_uid not in (os.geteuid(), 0):
            raise OSError(f"{path} belongs to user {found.st_uid}")
        if found.st_mode & others:
            raise OSError(f"{path} has mode {found.st_mode & 0o7777:04o}; allowed: 0600 or 0400")
        data = os.read(file, _MOST_BYTES + 1)
        if not _BYTES <= len(data) <= _MOST_BYTES:
            raise OSError(f"{path} has {len(data)} bytes; allowed: {_BYTES} to {_MOST_BYTES}")
        return hashlib.sha256(b"reft secret of a job " + data).digest()
    finally:
        os.close(file)


def _name(env: Mapping[str, str]) -> str:
    """What rank 0 calls the file: the same at each start by one launcher."""
    if "TORCHELASTIC_RUN_ID" in env:
        names = ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT")
        return digest(*(env.get(name, "") for name in names))
    mine = launch.launch(env)
    return digest(mine.place, mine.command or secrets.token_hex(16))


def _folders(env: Mapping[str, str]) -> list[Path]:
    """Where the file may be. The home directory may be one of a network, so jobs that are known to
    be on one host leave it alone; as do those whose secret others may have seen in the store."""
    run_dir = Path(env["REFT_RUN_DIR"]) if env.get("REFT_RUN_DIR") else default_run_dir(env)
    found = [run_dir / "secrets"] if run_dir.is_absolute() else []
    if _hosts(env) != 1 and not _may_hand(env) and env.get("HOME", "").startswith("/"):
        found.append(Path(env["HOME"]) / ".reft" / "secrets")
    return found


def _hosts(env: Mapping[str, str]) -> int:
    """The number of hosts by the launcher's variables, 2 for more; 0: unknown. They are hints, but
    no other user writes them."""
    world, here = launch.number(env, "WORLD_SIZE"), launch.number(env, "LOCAL_WORLD_SIZE")
    if world and here:
        return 1 if world == here else 2
    return min(2, launch.number(env, "SLURM_JOB_NUM_NODES"))


def _folder(path: Path) -> int:
    """Opens a directory that is this user's alone to write.

    Raises:
        OSError: it is not.
    """
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    found = os.fstat(folder)
    if found.st_uid == os.geteuid() and not found.st_mode & 0o022:
        return folder
    os.close(folder)
    raise OSError(f"{path} must be a directory of this user with mode 0700")


def _kept(path: Path, name: str) -> bytes:
    """The secret in the file that `_keep` has made.

    Raises:
        OSError: there is no such file.
        ValueError: it is not as `_keep` makes it.
    """
    folder = _folder(path)
    try:
        file = os.open(
            name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, dir_fd=folder
        )
        try:
            found = os.fstat(file)
            value = os.read(file, _BYTES + 1)
        finally:
            os.close(file)
        mine = stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid()
        if not mine or found.st_mode & 0o077 or len(value) != _BYTES:
            raise ValueError(f"{path / name} is not the secret of a job of this user")
        with contextlib.suppress(OSError):
            os.utime(name, dir_fd=folder, follow_symlinks=False)  # it is in use
        return value
    finally:
        os.close(folder)


def _keep(path: Path, name: str, value: bytes) -> bytes:
    """Makes the file, and returns what it holds: another rank 0 of this name may have been quicker.

    Raises:
        OSError: it cannot be made.
        ValueError: something else is there that cannot be removed.
    """
    # `~/.reft`, the run directory.
    folders.make_private(path.parent)
    os.close(_folder(path.parent))  # or others could put another folder in its place
    path.mkdir(mode=0o700, exist_ok=True)
    folder = _folder(path)
    temporary = f".{secrets.token_hex(8)}"
    try:
        _expire(folder)
        file = os.open(
            temporary,
            os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC,
            0o600,
            dir_fd=folder,
        )
        try:
            os.write(file, value)
        finally:
            os.close(file)
        with contextlib.suppress(FileExistsError):
            os.link(temporary, name, src_dir_fd=folder, dst_dir_fd=folder, follow_symlinks=False)
            return value
        with contextlib.suppress(OSError, ValueError):
            return _kept(path, name)
        os.rename(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
        return value
    finally:
        with contextlib.suppress(OSError):
            os.unlink(temporary, dir_fd=folder)
        os.close(folder)


def _expire(folder: int) -> None:
    """Removes what no job has used for long."""
    before = time.time() - _KEPT_SEC
    with os.scandir(folder) as entries:
        for _, entry in zip(range(_MOST_FILES), entries, strict=False):
            if not _OWN_NAME.fullmatch(entry.name):
                continue
            with contextlib.suppress(OSError):
                found = entry.stat(follow_symlinks=False)
                mine = stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid()
                if mine and found.st_size <= _BYTES and found.st_mtime < before:
                    os.unlink(entry.name, dir_fd=folder)


# -- the exchange


def share(
    raw: Any, rank: int, world: int, attempt: Attempt, env: Mapping[str, str]
) -> TrustedStore:
    """Takes part in the exchange after which all ranks have the secret: three store operations a
    rank.

    Args:
        raw: keys that no other attempt sees.

    Raises:
        Refused: some rank has not.
    """
    if rank == 0:
        return _lead(raw, world, attempt, env)
    return _follow(raw, rank, world, attempt, env)


def _lead(raw: Any, world: int, attempt: Attempt, env: Mapping[str, str]) -> TrustedStore:
    secret = attempt.secret
    if secret is None:
        if world > 1:
            raw.set("secret/id", _NONE)
        raise Refused(attempt.fault, True)
    store = secret.store(raw, attempt.number, world)
    if world == 1:
        return store
    raw.set("secret/id", f"{secret.name} {secret.id(attempt.number)}")
    raw.wait(["secret/all"])
    refused, answer = "", _GO
    if raw.check(["secret/refused"]):
        refused = "a rank has another secret than rank 0, or none that it may use"
    elif _may_hand(env) and raw.check(["secret/wanted"]):
        raw.set("secret/handed", f"{secret.name} {secret.value.hex()}")
        _voice.warn(
            "ranks on other hosts have no file in common with rank 0, so the job's secret went"
            f" through the job's store, as {WAY}=store says: a process that read or wrote there"
            f" during the start can pose as a rank. {FILE} names a file that all hosts have"
        )
    if refused:
        answer = _NONE
        raw.set("secret/handed", _NONE)
    store.put(AGENT, "secret/go", 0, answer)
    if refused:
        raise Refused(refused, True)
    return store


def _may_hand(env: Mapping[str, str]) -> bool:
    return env.get(WAY) == "store" and not env.get(FILE)


def _follow(
    raw: Any, rank: int, world: int, attempt: Attempt, env: Mapping[str, str]
) -> TrustedStore:
    published = _ID.fullmatch(_text(raw.get("secret/id")))
    try:
        if published is None:
            raise Refused("rank 0 cannot take part: it has no secret of the job", rank == 1)
        name, wanted = published.groups()
        secret = _found(env, name, wanted, attempt.number)
        if secret is not None:
            _check(secret, rank, attempt)
        elif not _may_hand(env):
            raise Refused(
                f"rank {rank} does not find the job's secret in"
                f" {' or '.join(map(str, _folders(env)))}. Set {FILE} to a file that all hosts"
                f" have or, if no other user can reach the job's store, set {WAY}=store",
                True,
            )
    except Exception as error:
        # The other ranks would wait for this one.
        raw.set("secret/refused", "1")
        _arrive(raw, world)
        if isinstance(error, Refused):
            raise
        raise Refused(f"rank {rank}: {type(error).__name__}: {error}", True) from error
    if secret is None:
        raw.add("secret/wanted", 1)
    _arrive(raw, world)
    if secret is None:
        secret = _handed(raw, wanted, attempt.number)
        _check(secret, rank, attempt)
    store = secret.store(raw, attempt.number, world)
    try:
        go = store.read(AGENT, "secret/go", 0)
    except Untrusted as error:
        raise Refused(str(error), True, store) from error
    if go != _GO.encode():
        raise Refused("some rank does not have the job's secret", False)
    return store


def _check(secret: Secret, rank: int, attempt: Attempt) -> None:
    """Whether rank 0 of this attempt has let this rank in."""
    wanted = secret.proof(rank, attempt.question, attempt.number)
    if not hmac.compare_digest(attempt.proof, wanted):
        raise Refused(f"rank {rank}: the number of the attempt is not rank 0's", True)


def _arrive(raw: Any, world: int) -> None:
    """Lets rank 0 go on after the last one. A forged count makes it go on too early, which ends
    with a rank that refuses."""
    if raw.add("secret/seen", 1) == world - 1:
        raw.set("secret/all", "1")


def _handed(raw: Any, wanted: str, attempt: str) -> Secret:
    """Takes the secret from the store. The last rank that takes it removes it there."""
    try:
        raw.wait(["secret/handed"], timedelta(seconds=_HANDED_SEC))
        published = _ID.fullmatch(_text(raw.get("secret/handed")))
        if raw.add("secret/taken", 1) >= raw.add("secret/wanted", 0):
            raw.delete_key("secret/handed")
    except RuntimeError:
        published = None
    if published is None:
        raise Refused("rank 0 does not hand out the job's secret", False)
    secret = Secret(bytes.fromhex(published[2]), published[1])
    if not hmac.compare_digest(secret.id(attempt), wanted):
        raise Refused("the secret in the job's store is not that of rank 0", True)
    return secret


def _text(value: bytes) -> str:
    return bytes(value)[:200].decode("ascii", errors="replace")
