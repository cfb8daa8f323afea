"""The job's secret: who finds it, where it is kept, and what an outsider can do about it."""

from __future__ import annotations

import os
import stat
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from reft._link import folders, secret, trusted_store
from reft._link.secret import Attempt, Refused, Secret
from reft._link.trusted_store import TrustedStore
from reft._torch import attempt

NUMBER = "0123456789abcdef"
Env = dict[str, str]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trusted_store, "_PATIENCE_SEC", 0.0)
    monkeypatch.setattr(secret, "_HANDED_SEC", 1.0)


@pytest.fixture
def host(tmp_path: Path) -> Env:
    """Variables of the ranks of one host of two."""
    return host_at(tmp_path / "one", tmp_path)


def host_at(run_dir: Path, home: Path) -> Env:
    return {
        "REFT_RUN_DIR": str(run_dir),
        "HOME": str(home),
        "TORCHELASTIC_RUN_ID": "7",
        "MASTER_ADDR": "a",
        "MASTER_PORT": "29500",
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "1",
    }


def store_of(raw: Any = None) -> Any:
    raw = raw or dist.HashStore()
    raw.set_timeout(timedelta(seconds=5))
    return raw


def shared(raw: Any, envs: list[Env], **more: Attempt) -> list[TrustedStore | Refused]:
    """What each rank gets. `rank_1`: its attempt, if it is not as it should be."""
    made = secret.of_rank_0(envs[0])

    def share(rank: int) -> TrustedStore | Refused:
        entered = Attempt(NUMBER, secret=made)
        if rank:
            question = f"{rank:016x}"
            entered = Attempt(NUMBER, question, made.proof(rank, question, NUMBER))
        try:
            return secret.share(raw, rank, len(envs), more.get(f"rank_{rank}", entered), envs[rank])
        except Refused as error:
            return error

    with ThreadPoolExecutor(len(envs)) as pool:
        return list(pool.map(share, range(len(envs))))


def know_each_other(stores: list[TrustedStore | Refused]) -> bool:
    first, *others = stores
    if not all(isinstance(one, TrustedStore) for one in stores):
        return False
    assert isinstance(first, TrustedStore)
    first.put("round", "hello", 0, "hello")
    return all(
        isinstance(one, TrustedStore) and one.read("round", "hello", 0) == b"hello"
        for one in others
    )


# -- the file


def test_ranks_of_a_host_find_the_file_in_the_run_directory(host: Env) -> None:
    host |= {"LOCAL_WORLD_SIZE": "2"}
    raw = store_of()
    assert know_each_other(shared(raw, [host, dict(host)]))
    (file,) = (Path(host["REFT_RUN_DIR"]) / "secrets").iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600 and file.stat().st_size == 32
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    assert not (Path(host["HOME"]) / ".reft").exists(), "all ranks are on one host"
    value = file.read_bytes()
    for key in raw.list_keys():
        assert value not in bytes(raw.get(key)) and value.hex().encode() not in bytes(raw.get(key))


def test_hosts_find_it_in_a_home_directory_that_they_share(host: Env, tmp_path: Path) -> None:
    raw = store_of()
    assert know_each_other(shared(raw, [host, host_at(tmp_path / "two", tmp_path)]))
    assert not raw.check(["secret/handed"])
    (file,) = (tmp_path / ".reft" / "secrets").iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert secret.of_rank_0(host).value == file.read_bytes(), "the next attempt has the same"


STORE = {"REFT_JOB_SECRET": "store"}


def test_without_a_common_file_it_goes_through_the_store_if_the_user_says_so(
    host: Env, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    envs = [host, *(host_at(tmp_path / f"{n}", tmp_path / f"home {n}") for n in range(3))]
    raw = store_of()
    assert know_each_other(shared(raw, [env | STORE for env in envs]))
    (line,) = capsys.readouterr().err.splitlines()
    assert "REFT_JOB_SECRET_FILE" in line and "can pose as a rank" in line
    assert not raw.check(["secret/handed"]), "the last one takes it out"
    assert not list(tmp_path.glob("home*/.reft")), "others may have seen it"


@pytest.mark.parametrize("more", [{}, {"REFT_JOB_SECRET": "file"}, {"REFT_JOB_SECRET": "stor"}])
def test_otherwise_the_job_trains_without_reft(host: Env, tmp_path: Path, more: Env) -> None:
    raw = store_of()
    other = host_at(tmp_path / "two", tmp_path / "home")
    first, second = shared(raw, [host | more, other | more])
    assert isinstance(first, Refused) and first.to_say
    assert isinstance(second, Refused)
    assert "REFT_JOB_SECRET_FILE" in str(second) and "REFT_JOB_SECRET=store" in str(second)
    assert bytes(raw.get("secret/handed")) == b"none"


def test_an_outsider_who_asks_for_it_does_not_get_it(host: Env, tmp_path: Path) -> None:
    raw = store_of()
    raw.set("secret/wanted", "1")
    assert know_each_other(shared(raw, [host, host_at(tmp_path / "two", tmp_path)]))
    for key in raw.list_keys():
        assert secret.of_rank_0(host).value.hex().encode() not in bytes(raw.get(key))


def test_a_rank_that_fails_keeps_no_other_waiting(
    host: Env, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*arguments: Any) -> None:
        raise FileNotFoundError("no usable temporary directory")

    monkeypatch.setattr(secret, "_found", fails)
    first, second = shared(store_of(), [host, dict(host)])
    assert isinstance(first, Refused)
    assert isinstance(second, Refused) and "no usable temporary directory" in str(second)


def test_all_ranks_on_one_host_never_take_it_from_the_store(host: Env, tmp_path: Path) -> None:
    """Else an outsider with the store would write another one for them."""
    one = {"LOCAL_WORLD_SIZE": "2"}
    raw = store_of()
    raw.set("secret/handed", f"{'0' * 32} {'ab' * 32}")
    first, second = shared(raw, [host | one, host_at(tmp_path / "elsewhere", tmp_path) | one])
    assert isinstance(first, Refused) and isinstance(second, Refused)


def test_a_file_of_the_user_is_the_secret(host: Env, tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_bytes(os.urandom(32))
    file.chmod(0o400)
    (tmp_path / "link").symlink_to(file)  # as secrets in Kubernetes are
    given = {"REFT_JOB_SECRET_FILE": str(file)}
    raw = store_of()
    other = host_at(tmp_path / "two", tmp_path / "home")
    linked = {"REFT_JOB_SECRET_FILE": str(tmp_path / "link")}
    assert know_each_other(shared(raw, [host | given, other | linked]))
    assert not raw.check(["secret/handed"])
    another = tmp_path / "another"
    another.write_bytes(os.urandom(32))
    another.chmod(0o600)
    first, second = shared(
        store_of(), [host | given, other | {"REFT_JOB_SECRET_FILE": str(another)}]
    )
    assert isinstance(first, Refused) and isinstance(second, Refused)


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o620, 0o604])
def test_a_file_that_others_can_read_is_refused(tmp_path: Path, mode: int) -> None:
    file = tmp_path / "secret"
    file.write_bytes(os.urandom(32))
    file.chmod(mode)
    if os.geteuid() == 0 and mode == 0o640:  # of root, for a group: a secret with an fsGroup
        assert secret.given(file)
        return
    with pytest.raises(OSError, match=r"mode 0\d+; allowed"):
        secret.given(file)


@pytest.mark.parametrize("data", [b"", b"short", b"x" * 5000])
def test_a_file_of_another_size_is_refused(tmp_path: Path, data: bytes) -> None:
    file = tmp_path / "secret"
    file.write_bytes(data)
    file.chmod(0o600)
    with pytest.raises(OSError, match="bytes; allowed"):
        secret.given(file)


def test_what_is_no_file_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)  # without a writer: opening it must not wait
    for path in (tmp_path / "pipe", tmp_path, Path("/dev/zero"), tmp_path / "missing"):
        with pytest.raises(OSError):
            secret.given(path)


def test_a_file_that_is_not_as_reft_made_it_is_replaced(host: Env, tmp_path: Path) -> None:
    made = secret.of_rank_0(host)
    file = tmp_path / "one" / "secrets" / made.name
    home = tmp_path / ".reft" / "secrets" / made.name
    home.unlink()
    for spoil in (lambda: file.chmod(0o644), lambda: file.write_bytes(b"x")):
        spoil()
        again = secret.of_rank_0(host)
        home.unlink()
        assert again.value != made.value and file.read_bytes() == again.value
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        made = again
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_bytes(b"x" * 32)
    file.unlink()
    file.symlink_to(elsewhere)
    assert secret.of_rank_0(host).value != b"x" * 32 and elsewhere.read_bytes() == b"x" * 32


def test_a_directory_that_others_can_write_to_is_not_used(host: Env, tmp_path: Path) -> None:
    made = secret.of_rank_0(host)
    (tmp_path / "one" / "secrets").chmod(0o777)
    (tmp_path / ".reft" / "secrets").chmod(0o777)
    with pytest.raises(Refused, match="mode 0700"):  # somebody may have put it there
        secret.of_rank_0(host)
    alone = secret.of_rank_0(host | {"WORLD_SIZE": "1"})
    assert alone.value != made.value


def test_a_run_directory_with_missing_parents_is_safe(tmp_path: Path) -> None:
    run_dir = tmp_path / "a" / "b" / "run"
    before = os.umask(0o002)
    try:
        secret.of_rank_0(host_at(run_dir, tmp_path))
    finally:
        os.umask(before)
    assert (run_dir / "secrets").is_dir() and folders.problem(run_dir) == ""


def test_files_of_jobs_that_are_long_gone_are_removed(host: Env, tmp_path: Path) -> None:
    secret.of_rank_0(host)
    folder = tmp_path / "one" / "secrets"
    gone = [folder / ("0" * 32), folder / ("." + "0" * 16)]
    theirs = [folder / "cluster.key", folder / ("f" * 32)]
    for path in (*gone, *theirs):
        path.write_bytes(b"x" * (33 if path in theirs else 32))
        os.utime(path, (0, 0))
    secret.of_rank_0(host | {"TORCHELASTIC_RUN_ID": "another job"})
    assert not any(path.exists() for path in gone) and len(list(folder.iterdir())) == 4
    assert all(path.exists() for path in theirs), "not made by reft"


# -- an outsider with the store


def test_a_rank_is_not_led_into_an_earlier_attempt(host: Env) -> None:
    """By a replay of all that rank 0 has written in it: the rank's own question was another one."""
    made = secret.of_rank_0(host)
    replayed = Attempt(NUMBER, "f" * 16, made.proof(1, "e" * 16, NUMBER))
    for wrong in (replayed, replace(replayed, proof=""), replace(replayed, proof="0" * 64)):
        first, second = shared(store_of(), [host, dict(host)], rank_1=wrong)
        assert isinstance(second, Refused) and "attempt" in str(second)


@pytest.mark.parametrize(
    "value", [b"", b"\xff" * 99, b"[" * 200_000, b"../../etc/passwd x", b"0" * 32 + b" " + b"0" * 64]
)
def test_a_forged_id_ends_no_rank(host: Env, value: bytes) -> None:
    class Forged(dist.HashStore):
        def get(self, key: str) -> Any:
            return value if key == "secret/id" else super().get(key)

    first, second = shared(store_of(Forged()), [host | {"LOCAL_WORLD_SIZE": "2"}] * 2)
    assert isinstance(second, Refused)


def test_forged_answers_of_rank_0_are_as_if_they_were_not_there() -> None:
    store = dist.HashStore()
    keys = dist.PrefixStore("reft/agree", store)
    for value in (b"", b"\xff\xfe", b"[" * 200_000, b"x y z", b"0" * 16):
        keys.set("answer/1", value)
        keys.set("ask/1", value)
        with pytest.raises(RuntimeError, match="rank 0 does not answer"):
            attempt.agree(store, 1, 2, timedelta(seconds=0.05))
        keys.set("ask/1", value)
        with pytest.raises(RuntimeError, match="did not (join|take the answer)"):
            attempt.agree(store, 0, 2, timedelta(seconds=0.05))


def test_rank_0_proves_its_answer_to_each_rank() -> None:
    made = Secret(bytes(32), "0" * 32)
    store = dist.HashStore()
    with ThreadPoolExecutor(3) as pool:
        wait = timedelta(seconds=20)
        calls = [
            pool.submit(attempt.agree, store, r, 3, wait, None, made if r == 0 else None)
            for r in range(3)
        ]
        first, *others = [call.result() for call in calls]
    assert first.secret is made
    for rank, one in enumerate(others, 1):
        assert one.number == first.number and one.secret is None
        assert one.proof == made.proof(rank, one.question, first.number)
    assert others[0].proof != others[1].proof
