"""Whatever is wrong around a job: one clear error each, and the training comes to the same result as without reft."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import struct
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.launchers import Forkrun, TrainJob, kill_all

HERE = Path(__file__).resolve().parent


HEADER = struct.Struct("<IHHII")
MAGIC, VERSION = 0x57544652, 3


@pytest.fixture(scope="module")
def forkrun() -> Iterator[Forkrun]:
    launcher = Forkrun()
    yield launcher
    launcher.close()


@pytest.fixture(scope="module")
def expected(forkrun: Forkrun) -> Iterator[list[str]]:
    """Final hashes of a run under gloo."""
    path = Path(tempfile.mkdtemp(prefix="reft-ref-"))
    job = TrainJob(forkrun, path, "reference").start(backend="gloo")
    assert job.wait() == 0, job.said
    yield job.finals()
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def job(forkrun: Forkrun, folder: Path) -> Iterator[TrainJob]:
    job = TrainJob(forkrun, folder, "bad")
    yield job
    job.end()


def unharmed(job: TrainJob, expected: list[str]) -> None:
    assert job.wait() == 0, job.said
    assert job.finals() == expected
    assert "Traceback" not in job.said, job.said


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("REFT_SNAPSHOT", "perhaps"),
        ("REFT_SNAPSHOT_SLOTS", "7"),
        ("REFT_SNAPSHOT_SLOTS", "2.5"),
        ("REFT_SNAPSHOT_CHUNK_BYTES", "12Q"),
        ("REFT_SNAPSHOT_WAIT_SEC", "-1"),
        ("REFT_SNAPSHOT_PROTECTION", "raid"),
        ("REFT_AGENT_LINGER_SEC", "soon"),
        ("REFT_RESUME", "yes"),
        ("REFT_OP_LOG_RECORDS", "9" * 30),
        ("REFT_FAULT", "1:2:nowhere:kill"),
        ("REFT_JOB_ID", "caf\udce9"),
    ],
)
def test_malformed_setting(job: TrainJob, expected: list[str], name: str, value: str) -> None:
    job.start(**{name: value})
    unharmed(job, expected)
    lines = job.lines(name)
    assert len(lines) == 1, job.said  # all ranks have the same setting: one says it
    assert value.replace("\udce9", "\\xe9") in lines[0]
    assert job.lines("without snapshots"), job.said


@pytest.mark.timeout(120)
def test_unknown_setting_is_warned_about(job: TrainJob, expected: list[str]) -> None:
    job.start(REFT_SNAPSHOT_SLOT="3")
    unharmed(job, expected)
    lines = job.lines("REFT_SNAPSHOT_SLOT ")
    assert len(lines) == 1 and "REFT_SNAPSHOT_SLOTS" in lines[0], job.said


@pytest.mark.timeout(120)
@pytest.mark.parametrize("value", ["/proc/nowhere", "/dev/null/x"])
@pytest.mark.parametrize("name", ["REFT_RUN_DIR", "REFT_VAULT_DIR", "REFT_AGENT_PATH"])
def test_impossible_place(job: TrainJob, expected: list[str], name: str, value: str) -> None:
    job.start(**{name: value, "REFT_CONNECT_SEC": "2"})
    unharmed(job, expected)
    assert job.lines("without snapshots"), job.said


@pytest.mark.timeout(120)
def test_run_directory_that_others_can_write(job: TrainJob, expected: list[str], folder: Path) -> None:
    """The reason is said, by the ranks and not by the agent too; no log is named that was not written."""
    shared = folder / "shared"
    shared.mkdir(mode=0o777)
    shared.chmod(0o777)
    job.start(REFT_RUN_DIR=str(shared), REFT_CONNECT_SEC="2")
    unharmed(job, expected)
    assert job.lines("without snapshots", "must be a directory of this user with mode 0700"), job.said
    assert "agent.log" not in job.said and not re.search(r"reft\.\w+ error", job.said), job.said
    assert list(shared.iterdir()) == []


@pytest.mark.timeout(120)
def test_socket_path_too_long(job: TrainJob, expected: list[str], folder: Path) -> None:
    job.start(REFT_RUN_DIR=str(folder / ("d" * 120)), REFT_CONNECT_SEC="2")
    unharmed(job, expected)


def talk_nonsense(path: Path, stop: threading.Event) -> None:
    """Connects again and again and sends what is no hello."""
    hello = b'{"role":"rank","protocol":99,"rank":-5}'
    nonsense = [
        b"GET / HTTP/1.1\r\n\r\n",
        os.urandom(4096),
        HEADER.pack(MAGIC, VERSION, 1, 0xFFFFFFFF, 0),
        HEADER.pack(MAGIC, 9, 1, 2, 0) + b"{}",
        HEADER.pack(MAGIC, VERSION, 1, len(hello), 0) + hello,
        HEADER.pack(MAGIC, VERSION, 1, 2, 0) + b"{}",
        HEADER.pack(MAGIC, VERSION, 20, 32, 0) + bytes(32),
        HEADER.pack(MAGIC, VERSION, 10, 18, 0) + b'{"rank":0,"bytes":',
        HEADER.pack(MAGIC, VERSION, 1, 1000, 0) + b"[" * 500,
        b"",
    ]
    turn = 0
    while not stop.is_set():
        with socket.socket(socket.AF_UNIX) as peer:
            try:
                peer.connect(str(path))
                peer.sendall(nonsense[turn % len(nonsense)])
                peer.settimeout(0.05)
                peer.recv(4096)
            except OSError:
                pass
        turn += 1
        time.sleep(0.002)


@pytest.mark.timeout(120)
def test_foreign_peers_at_the_agents_socket(job: TrainJob, expected: list[str]) -> None:
    job.start("--delay", "0.03")
    job.until_step(2)
    agents = job.agents
    stop = threading.Event()
    noise = threading.Thread(target=talk_nonsense, args=(job.run / "bad" / "node-0" / "agent.sock", stop))
    noise.start()
    try:
        job.until_step(22)
        assert job.agents == agents  # not restarted
    finally:
        stop.set()
        noise.join()
    unharmed(job, expected)


def answer(reply: bytes) -> Callable[[socket.socket], None]:
    def serve(server: socket.socket) -> None:
        while True:
            try:
                peer, _ = server.accept()
                if reply:
                    peer.sendall(reply)
                kept.append(peer)
            except OSError:
                return

    kept: list[socket.socket] = []
    return serve


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "reply",
    [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n" * 4, HEADER.pack(MAGIC, 7, 2, 2, 0) + b"{}"],
    ids=["mute", "http", "version"],
)
def test_foreign_server_at_the_agents_path(job: TrainJob, expected: list[str], reply: bytes) -> None:
    place = job.run / "bad" / "node-0"
    place.mkdir(parents=True, mode=0o700)
    server = socket.socket(socket.AF_UNIX)
    server.bind(str(place / "agent.sock"))
    server.listen(16)
    thread = threading.Thread(target=answer(reply), args=(server,), daemon=True)
    thread.start()
    try:
        job.start(REFT_CONNECT_SEC="1.5")
        unharmed(job, expected)
        assert job.lines("without snapshots"), job.said
    finally:
        server.shutdown(socket.SHUT_RDWR)
        server.close()


@pytest.mark.timeout(120)
def test_too_little_memory(job: TrainJob, expected: list[str]) -> None:
    job.start(REFT_SNAPSHOT_HOST_BYTES="1K")
    unharmed(job, expected)
    lines = job.lines("REFT_SNAPSHOT_HOST_BYTES")
    assert 1 <= len(lines) <= job.nproc, job.said
    assert "without snapshots" in lines[0]


@pytest.mark.timeout(120)
def test_vault_directory_that_is_full(job: TrainJob, expected: list[str], folder: Path) -> None:
    """A file system of 64 KiB takes no vault."""
    import subprocess

    small = folder / "small"
    small.mkdir()
    if (
        os.geteuid()
        or subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(small)], capture_output=True
        ).returncode
    ):
        pytest.skip("cannot mount a small tmpfs here")
    try:
        job.start(REFT_VAULT_DIR=str(small))
        unharmed(job, expected)
        assert job.lines("without snapshots") or job.lines("was not taken"), job.said
    finally:
        kill_all(job.agents)
        subprocess.run(["umount", "-l", str(small)], check=False)


@pytest.mark.timeout(120)
def test_vault_directory_that_others_may_write(
    job: TrainJob, expected: list[str], folder: Path
) -> None:
    """What is made in it for this job stays, and is checked: it stands below the open one."""
    shared = folder / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    job.start(REFT_VAULT_DIR=str(shared / "vaults"))
    unharmed(job, expected)
    (line,) = job.lines("is not safe")
    assert f"{shared} is writable by other users" in line, job.said
    assert not list(shared.rglob("*.vault")), "nothing of the job lies there"


@pytest.mark.timeout(120)
def test_two_jobs_with_one_id(job: TrainJob, expected: list[str], folder: Path) -> None:
    second_launcher = Forkrun()
    try:
        job.start("--delay", "2")
        job.until_step(2)
        second = TrainJob(second_launcher, folder, "bad").start(REFT_CONNECT_SEC="2")
        unharmed(second, expected)
        assert second.lines("without snapshots"), second.said
        unharmed(job, expected)
        assert not job.lines("without snapshots"), job.said
    finally:
        second_launcher.close()


# One process with settings of its own, and on a node of its own if wanted.
ONE_RANK_DIFFERS = """
import json, os, runpy, sys
os.environ.update(json.loads(sys.argv.pop(1)).get(os.environ["RANK"], {}))
if "--nodes" in sys.argv:
    sys.argv.remove("--nodes")
    os.environ.update(GROUP_RANK=os.environ["RANK"], LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
sys.argv[0] = sys.argv.pop(1)
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.timeout(120)
@pytest.mark.parametrize("nodes", [False, True], ids=["one_node", "two_nodes"])
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("name", "value", "named"),
    [
        ("REFT_SNAPSHOT_SLOTS", "9", "REFT_SNAPSHOT_SLOTS"),
        ("REFT_RUN_DIR", "/proc/nowhere", "/proc/nowhere"),
        ("REFT_VAULT_DIR", "/proc/nowhere", "/proc/nowhere"),
    ],
)
def test_one_rank_that_cannot_take_part(
    job: TrainJob, expected: list[str], folder: Path, name: str, value: str, named: str, rank: int,
        nodes: bool
) -> None:
    """The others do not wait for it: all ranks train without snapshots, and it is said which rank and why."""
    script = folder / "one_rank_differs.py"
    script.write_text(ONE_RANK_DIFFERS)
    worker = [str(HERE.parent / "fault" / "train_worker.py"), "--out", str(job.out)]
    arguments = [json.dumps({str(rank): {name: value}}), *(["--nodes"] if nodes else []), *worker]
    environment = {"REFT_JOB_ID": job.job, "REFT_RUN_DIR": str(job.run), "REFT_AGENT_LINGER_SEC": "2"}
    environment["REFT_CONNECT_SEC"] = "3"
    started = time.monotonic()
    job.launcher.run([str(script), *arguments], environment, job.log, 2, 60)
    assert time.monotonic() - started < 40, job.said
    assert job.finals() == expected
    assert "Traceback" not in job.said, job.said
    said = job.lines("without snapshots")
    assert 1 <= len(said) <= 2, job.said
    assert job.lines(named), job.said
    # The healthy one names it, whatever the other says of itself.
    assert any(re.match(rf"reft: (warning: )?rank {1 - rank}:", line) for line in said), job.said
    if nodes:
        assert job.lines(f"rank {1 - rank}:", f"rank {rank} cannot take part"), job.said


class Damage:
    """Edits vault files as `snapshot/vault/FORMAT.md` lays them out."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def slots(self) -> list[tuple[int, int]]:
        """(offset, bytes) of each slot."""
        data = self.path.read_bytes()
        at = 8 + 4 + 4 + 4 + 4 + 8 * 5 + 128 + 8
        extents = [struct.unpack_from("<QQQ", data, at + 24 * i) for i in range(3)]
        return [(offset, size) for offset, size, _ in extents if offset]

    def write(self, at: int, data: bytes) -> None:
        with open(self.path, "r+b") as file:
            file.seek(at)
            file.write(data)

    def flip(self, at: int) -> None:
        with open(self.path, "r+b") as file:
            file.seek(at)
            byte = file.read(1)[0]
            file.seek(at)
            file.write(bytes([byte ^ 0x10]))

    def payload(self, slot: int) -> tuple[int, int, int]:
        """(step, offset in the file, bytes) of a slot's payload."""
        offset, _ = self.slots()[slot]
        header = self.path.read_bytes()[offset : offset + 4096]
        # magic u64, version u32, state u32, generation u64, check u64, step i64, incarnation u64, 3
        # × table, 3 × objects, 3 × chunks
        step = struct.unpack_from("<q", header, 32)[0]
        at, size = struct.unpack_from("<QQ", header, 48 + 9 * 8)
        return step, offset + at, size

    def sealed(self) -> dict[int, int]:
        """Step of each sealed slot."""
        data = self.path.read_bytes()
        return {
            i: self.payload(i)[0]
            for i, (at, _) in enumerate(self.slots())
            if struct.unpack_from("<I", data, at + 12)[0] == 2
        }

    def newest(self) -> int:
        """The sealed slot of the highest step. One that was being written when the job ended is lost to nobody."""
        sealed = self.sealed()
        return max(sealed, key=lambda i: sealed[i])


def interrupted(job: TrainJob, vaults: Path) -> list[Path]:
    """Ends a job that keeps its vaults in files, at step 10 or a little later. Returns the files."""
    vaults.mkdir()
    job.start("--delay", "0.03", REFT_VAULT_DIR=str(vaults))
    job.until_step(10)
    kill_all(job.agents)
    job.kill_ranks()
    job.wait()
    job.end()
    return sorted(vaults.rglob("*.vault"))


def flip_newest(files: list[Path]) -> None:
    damage = Damage(files[0])
    _, at, size = damage.payload(damage.newest())
    damage.flip(at + size // 2)


def flip_all(files: list[Path]) -> None:
    damage = Damage(files[0])
    for i in range(len(damage.slots())):
        _, at, size = damage.payload(i)
        damage.flip(at + size // 3)


def flip_header(files: list[Path]) -> None:
    damage = Damage(files[0])
    damage.flip(damage.slots()[damage.newest()][0] + 34)


def other_version(files: list[Path]) -> None:
    Damage(files[0]).write(8, struct.pack("<I", 99))


def truncate(files: list[Path]) -> None:
    os.truncate(files[0], files[0].stat().st_size // 2)


def truncate_to_nothing(files: list[Path]) -> None:
    os.truncate(files[0], 0)


def zeros(files: list[Path]) -> None:
    size = files[0].stat().st_size
    files[0].write_bytes(bytes(size))


def noise(files: list[Path]) -> None:
    """And an earlier file that was not usable has been kept."""
    files[0].write_bytes(os.urandom(files[0].stat().st_size))
    files[0].with_name(f"{files[0].name}.unusable").write_text("earlier")


def text(files: list[Path]) -> None:
    files[0].write_text("to do: make room on this disk\n")


def directory(files: list[Path]) -> None:
    files[0].unlink()
    files[0].mkdir()


def link(files: list[Path]) -> None:
    files[0].rename(files[0].with_suffix(".spare"))
    files[0].symlink_to(files[0].with_suffix(".spare"))


def other_job(files: list[Path]) -> None:
    """The job that starts finds the files of another one under its name."""
    files[0].parent.rename(files[0].parent.with_name("other"))


def swap(files: list[Path]) -> None:
    """Each rank's file under the other's name."""
    spare = files[0].with_suffix(".spare")
    files[0].rename(spare)
    files[1].rename(files[0])
    spare.rename(files[1])


def nothing(files: list[Path]) -> None:
    """Control: the vaults are whole."""


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("damage", "resumes"),
    [
        (nothing, "newest"),
        (flip_newest, "older"),
        (flip_header, "older"),
        (flip_all, "beginning"),
        (other_version, "beginning"),
        (truncate, "beginning"),
        (truncate_to_nothing, "beginning"),
        (zeros, "beginning"),
        (noise, "beginning"),
        (text, "beginning"),
        (directory, "beginning"),
        (link, "beginning"),
        (other_job, "beginning"),
        (swap, "beginning"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_damaged_vault_files(
    job: TrainJob, expected: list[str], folder: Path, damage: Callable[[list[Path]], None], resumes: str
) -> None:
    vaults = folder / "vaults"
    files = interrupted(job, vaults)
    assert len(files) == 2
    completed = min(job.losses(rank)[-1][0] for rank in range(2))
    sealed = [set(Damage(file).sealed().values()) for file in files]
    damage(files)
    name = "other" if damage is other_job else "bad"
    lost = {path: path.read_bytes() for path in (vaults / name).iterdir() if path.is_file() and not path.is_symlink()}
    again = TrainJob(job.launcher, folder, name, out=job.out).start(REFT_VAULT_DIR=str(vaults))
    unharmed(again, expected)
    said = again.said.split("forkrun:")[-1]  # the same log goes on
    found = re.search(r"resumed at step (\d+)", said)
    if resumes == "older":  # than the newest of rank 0, which is the damaged one
        sealed[0].discard(max(sealed[0]))
    common = sealed[0] & sealed[1]  # no step is whole without both ranks' halves
    if resumes == "beginning" or not common:
        assert found is None, said
        assert again.lines("beginning"), said
    else:
        assert found and int(found[1]) == max(common), (said, sealed)
    if resumes == "newest":
        assert found and completed - int(found[1]) <= 1, said
        assert "damaged" not in said and "not usable" not in said, said
    elif damage in (flip_newest, flip_header, flip_all):
        assert "damaged snapshot: rank 0" in said, said
    else:
        kept = re.findall(r"(\S+) is not usable \(.+\) and is kept as (\S+);", said)
        assert len(kept) == (2 if damage in (swap, other_job) else 1), said
        for path, kept_as in kept:
            place = Path(path).with_name(kept_as)
            if damage is directory:
                assert place.is_dir()
            elif damage is link:
                assert place.is_symlink() and place.read_bytes() == lost[Path(path).with_suffix(".spare")]
            else:
                assert place.read_bytes() == lost[Path(path)]
        if damage is noise:
            assert files[0].with_name(f"{files[0].name}.unusable").read_text() == "earlier"


@pytest.mark.timeout(120)
def test_foreign_file_while_the_agent_has_the_vault_in_memory(job: TrainJob, expected: list[str], folder: Path) -> None:
    """A file directory for vaults from the second start on, with something in it: that is kept, and the step comes back."""
    job.start("--delay", "0.03", REFT_AGENT_LINGER_SEC="60")
    job.until_step(10)
    job.kill_ranks()
    job.wait()
    place = folder / "vaults" / job.job / "rank-0.vault"
    place.parent.mkdir(parents=True)
    place.write_text("somebody's only copy")
    again = TrainJob(job.launcher, folder, job.job, out=job.out).start(REFT_VAULT_DIR=str(folder / "vaults"))
    unharmed(again, expected)
    assert re.search(r"resumed at step 9|resumed at step 1\d", again.said), again.said
    assert place.with_name("rank-0.vault.unusable").read_text() == "somebody's only copy"
