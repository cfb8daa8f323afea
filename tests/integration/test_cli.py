"""The command `reft` against an agent that is played here: every test looks at what a user sees and at the exit code."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.fake_agent import AgentSocket

pytest.importorskip("click")
pytest.importorskip("rich")

from click.testing import CliRunner, Result  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
HEADER = struct.Struct("<IHHII")
BALLOT = struct.Struct("<qQQQB7x")
MAGIC, VERSION = 0x57544652, 3

RANK_STATS = {
    "steps": 412,
    "step_ns": 93_000_000,
    "committed_step": 411,
    "sealed_step": 411,
    "gate_last_ns": 1_200_000,
    "capture_last_ns": 300_000,
    "bytes_copied": 5 << 30,
    "dropped": 1,
    "skipped": 2,
    "unprotected": 0,
}


def status(**changes: Any) -> dict[str, Any]:
    ranks = [{"rank": r, "pid": 100 + r, "alive": True, "stats": {**RANK_STATS, **changes}} for r in range(2)]
    return {"job": "demo", "node": 0, "agent_pid": 77, "world": 2, "ranks": ranks}


class FakeAgent(AgentSocket):
    """Answers requests with canned JSON; `fds` go with the answer to vault_get."""

    def __init__(self, run_dir: Path, job: str = "demo") -> None:
        self.answers: dict[int, tuple[int, dict[str, Any]]] = {}
        self.fds: dict[int, int] = {}
        self.requests: list[tuple[int, dict[str, Any]]] = []
        super().__init__(run_dir, job)

    def talk(self, connection: socket.socket) -> None:
        stream = connection.makefile("rb")
        while header := stream.read(HEADER.size):
            magic, version, kind, size, _ = HEADER.unpack(header)
            assert (magic, version) == (MAGIC, VERSION)
            body = stream.read(size)
            if kind == 20:  # a vote: committed at once
                step, incarnation = BALLOT.unpack(body)[:2]
                connection.sendall(HEADER.pack(MAGIC, VERSION, 21, size, 0) + BALLOT.pack(step, incarnation, 0, 0, 1))
                continue
            payload = json.loads(body or b"{}")
            fd = -1
            if kind == 1:
                answer: tuple[int, dict[str, Any]] = (
                    2,
                    {"agent_pid": 77, "version": "0.1.0", "run_dir": "", "linger_sec": 1},
                )
            elif kind == 10:
                answer = (11, {"rank": payload["rank"]})
            elif kind == 14:
                fd = self.fds[payload["rank"]]
                answer = (15, {"rank": payload["rank"], "bytes": os.fstat(fd).st_size})
            else:
                answer = self.answers.get(kind, (3, {"what": f"unexpected type {kind}", "hint": ""}))
            self.requests.append((kind, payload))
            body = json.dumps(answer[1]).encode()
            frame = HEADER.pack(MAGIC, VERSION, answer[0], len(body), 0) + body
            if fd >= 0:
                socket.send_fds(connection, [frame], [fd])
            else:
                connection.sendall(frame)


@pytest.fixture
def run_dir(folder: Path) -> Path:
    return folder / "run"


@pytest.fixture
def agent(run_dir: Path) -> Iterator[FakeAgent]:
    fake = FakeAgent(run_dir)
    yield fake
    fake.close()


def reft(
    *arguments: str, run_dir: Path | None = None, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("REFT_")}
    environment["PYTHONPATH"] = os.pathsep.join([environment.get("PYTHONPATH", ""), str(ROOT / "python")]).strip(
        os.pathsep
    )
    environment["COLUMNS"] = "80"
    if run_dir is not None:
        environment["REFT_RUN_DIR"] = str(run_dir)
    return subprocess.run(
        [sys.executable, "-m", "reft._cli.main", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**environment, **(env or {})},
    )


def native_module() -> Any:
    pytest.importorskip("torch")
    return pytest.importorskip("reft._C", reason="needs the native module")


def test_help_names_every_command() -> None:
    done = reft("--help")
    assert done.returncode == 0
    for command in ("run", "top", "stack", "ls", "verify", "doctor"):
        assert f"\n  {command} " in done.stdout
    assert "Exit codes" in done.stdout


@pytest.mark.parametrize("command", ["run", "top", "stack", "ls", "verify", "doctor"])
def test_help_of_each_command_fits_eighty_columns(command: str) -> None:
    done = reft(command, "--help")
    assert done.returncode == 0, done.stderr
    assert "--json" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80


@pytest.mark.parametrize("command", [("top", "--once"), ("stack",), ("ls",), ("verify",)])
def test_without_an_agent_every_command_says_so_with_exit_code_3(command: tuple[str, ...], run_dir: Path) -> None:
    done = reft(*command, run_dir=run_dir)
    assert done.returncode == 3
    assert "no agent runs here" in done.stderr
    assert "Traceback" not in done.stderr
    as_json = reft(*command, "--json", run_dir=run_dir)
    assert as_json.returncode == 3
    assert "no agent" in json.loads(as_json.stdout)["error"]


def left_over_socket(run_dir: Path, job: str) -> None:
    directory = run_dir / job / "node-0"
    directory.mkdir(mode=0o700, parents=True)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(directory / "agent.sock"))


def test_a_socket_without_an_agent_is_exit_code_4(run_dir: Path) -> None:
    left_over_socket(run_dir, "demo")
    done = reft("stack", run_dir=run_dir)
    assert done.returncode == 4
    assert "has ended" in done.stderr


def test_sockets_of_dead_agents_do_not_ask_for_a_choice(agent: FakeAgent, run_dir: Path) -> None:
    left_over_socket(run_dir, "earlier")
    agent.answers[54] = (55, {"ranks": [{"rank": 1}], "text": "rank 1: alive\n"})
    assert reft("stack", run_dir=run_dir).returncode == 0


def test_several_jobs_ask_for_a_choice(agent: FakeAgent, run_dir: Path) -> None:
    FakeAgent(run_dir, "other")
    done = reft("stack", run_dir=run_dir)
    assert done.returncode == 2
    assert "demo, other" in done.stderr


def test_top_once_shows_every_rank(agent: FakeAgent, run_dir: Path) -> None:
    agent.answers[50] = (51, status())
    done = reft("top", "--once", run_dir=run_dir)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert "job demo" in lines[0] and "2 of 2 ranks alive" in lines[0]
    assert lines[2].split() == ["0", "412", "93.0", "ms", "411", "1.5", "ms", "5.0", "GiB", "1/2", "protected"]
    assert max(map(len, lines)) <= 80


def test_top_once_cries_unprotected_with_exit_code_1(agent: FakeAgent, run_dir: Path) -> None:
    agent.answers[50] = (51, status(unprotected=1, note="no optimizer step was seen"))
    done = reft("top", "--once", run_dir=run_dir)
    assert done.returncode == 1
    assert "UNPROTECTED" in done.stdout
    assert "ranks 0 1: no optimizer step was seen" in done.stdout


def test_top_reads_unset_steps(agent: FakeAgent, run_dir: Path) -> None:
    agent.answers[50] = (51, status(committed_step=(1 << 64) - 1, sealed_step=(1 << 64) - 1, step_ns=0))
    done = reft("top", "--once", run_dir=run_dir)
    assert done.returncode == 0
    assert done.stdout.splitlines()[2].split() == ["0", "412", "-", "-", "-", "5.0", "GiB", "1/2", "starting"]


@pytest.mark.parametrize(
    ("counters", "shown"),
    [
        (
            {"overhead_ppm": 12_345, "overhead_noise_ppm": 3_000},
            "a snapshot every step costs 1.2 % ± 0.30 % of the mean step (measured)",
        ),
        (
            {"overhead_ppm": (1 << 64) - 700, "overhead_noise_ppm": 900},
            "a snapshot every step costs at most 0.09 % of the mean step (within noise)",
        ),
        (
            {"overhead_ppm": 50_000, "overhead_noise_ppm": 0, "every": 8},
            "a snapshot every 8 steps costs 5.0 % ± 0.00 % of the mean step (measured)",
        ),
        (
            {"overhead_ppm": (1 << 64) - 1, "overhead_noise_ppm": (1 << 64) - 1},
            "a snapshot every step; overhead not measured yet",
        ),
    ],
)
def test_top_says_what_snapshots_cost(agent: FakeAgent, run_dir: Path, counters: dict[str, int], shown: str) -> None:
    agent.answers[50] = (51, status(**{"every": 1, "forecast_error_ppm": 240_000, **counters}))
    done = reft("top", "--once", run_dir=run_dir)
    assert shown + "; gap prediction error 24 %" in " ".join(done.stdout.split()), done.stdout


def test_top_without_a_terminal_prints_once(agent: FakeAgent, run_dir: Path) -> None:
    agent.answers[50] = (51, status(unprotected=1))
    done = reft("top", run_dir=run_dir, env={"FORCE_COLOR": "1"})
    assert done.returncode == 1, done.stderr
    assert done.stdout.count("job demo") == 1 and "UNPROTECTED" in done.stdout


@pytest.mark.parametrize("interval", ["nan", "inf", "0"])
def test_top_takes_no_interval_that_is_none(run_dir: Path, interval: str) -> None:
    done = reft("top", "--interval", interval, run_dir=run_dir)
    assert done.returncode == 2 and "--interval" in done.stderr and "Traceback" not in done.stderr, done.stderr


def test_top_json_is_the_status_of_each_agent(agent: FakeAgent, run_dir: Path) -> None:
    agent.answers[50] = (51, status())
    done = reft("top", "--json", run_dir=run_dir)
    assert json.loads(done.stdout)["agents"][0]["ranks"][1]["stats"]["steps"] == 412


def test_stack_prints_the_report(agent: FakeAgent, run_dir: Path) -> None:
    agent.answers[54] = (55, {"ranks": [{"rank": 1}], "text": "rank 1: alive\n"})
    done = reft("stack", "--rank", "1", run_dir=run_dir)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "rank 1: alive\n"
    assert (54, {"ranks": [1]}) in agent.requests
    as_json = reft("stack", "--json", run_dir=run_dir)
    assert json.loads(as_json.stdout)["agents"][0]["ranks"] == [{"rank": 1}]


def test_stack_of_an_unknown_rank_is_exit_code_3(agent: FakeAgent, run_dir: Path) -> None:
    agent.answers[54] = (55, {"ranks": [], "text": "\n"})
    assert reft("stack", "--rank", "9", run_dir=run_dir).returncode == 3
    as_json = reft("stack", "--rank", "9", "--json", run_dir=run_dir)
    assert as_json.returncode == 3
    assert "9" in json.loads(as_json.stdout)["error"]


def test_an_error_of_the_agent_is_exit_code_4(agent: FakeAgent, run_dir: Path) -> None:
    done = reft("stack", run_dir=run_dir)
    assert done.returncode == 4
    assert "unexpected type 54" in done.stderr


def test_run_adds_restarts_unless_given(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    script = tmp_path / "train.py"
    script.write_text("# reft\n")
    done = reft("run", "--json", "--dry-run", "--nproc-per-node", "2", str(script), "--max-restarts", "9")
    argv = json.loads(done.stdout)["argv"]
    assert argv[1:5] == ["-m", "torch.distributed.run", "--max-restarts", "3"]
    assert argv[5:] == ["--nproc-per-node", "2", str(script), "--max-restarts", "9"]
    given = reft("run", "--json", "--max_restarts=0", str(script))
    assert json.loads(given.stdout)["argv"][3:] == ["--max_restarts=0", str(script)]


def test_run_preloads_its_library_before_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    from reft._cli.preload import library

    if not library().is_file():
        pytest.skip("the library is built for x86-64 only")
    script = tmp_path / "train.py"
    script.write_text("import os\nprint('reft', os.environ['LD_PRELOAD'])\n")
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    done = reft("run", "--preload", "--json", str(script))
    assert json.loads(done.stdout)["environment"] == {"LD_PRELOAD": str(library())}
    monkeypatch.setenv("LD_PRELOAD", f"libdl.so.2 {library()}")
    started = reft("run", "--preload", "--standalone", str(script))
    assert started.returncode == 0, started.stderr
    assert f"reft {library()}:libdl.so.2\n" in started.stdout
    assert "environment" not in json.loads(reft("run", "--json", str(script)).stdout)


def test_run_runs_the_script_and_passes_its_exit_code_on(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    script = tmp_path / "train.py"
    script.write_text("import os, sys\nprint('reft', os.environ['RANK'], sys.argv[1:])\n")
    done = reft("run", "--standalone", str(script), "--epochs", "2")
    assert done.returncode == 0, done.stderr
    assert "reft 0 ['--epochs', '2']" in done.stdout
    missing = reft("run", str(tmp_path / "none.py"))
    assert missing.returncode == 3
    assert "script not found" in missing.stderr


def test_doctor_gives_findings_with_what_to_do(run_dir: Path) -> None:
    run_dir.mkdir(mode=0o755)
    run_dir.chmod(0o755)
    done = reft("doctor", "--json", run_dir=run_dir)
    findings = {finding["check"]: finding for finding in json.loads(done.stdout)["findings"]}
    assert findings["run dir"]["result"] == "fail"
    assert findings["run dir"]["todo"] == f"chmod 700 {run_dir}"
    assert done.returncode == 1
    text = reft("doctor", run_dir=run_dir)
    assert "chmod 700" in text.stdout
    assert max(map(len, text.stdout.splitlines())) <= 80


def test_doctor_folds_long_paths_at_their_separators(run_dir: Path) -> None:
    long = run_dir / "a-folder-of-the-first-level" / "and-one-below-it-that-is-long" / "third"
    done = reft("doctor", "--run-dir", str(long), run_dir=run_dir)
    lines = [line[15:] for line in done.stdout.splitlines()]
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert "a-folder-of-the-first-level/" in done.stdout and "and-one-below-it-that-is-long/" in done.stdout
    assert str(long) in "".join(line.strip() for line in lines)


@pytest.fixture
def dead_agent(run_dir: Path) -> Path:
    """The directory of a node as an agent that was killed leaves it."""
    node = run_dir / "job" / "node-0"
    node.mkdir(parents=True, mode=0o700)
    for name in ("agent.lock", "agent.log"):
        (node / name).touch()
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(node / "agent.sock"))
    return node


def test_doctor_cleans_up_after_dead_agents(run_dir: Path, dead_agent: Path) -> None:
    run_dir.chmod(0o700)
    before = reft("doctor", run_dir=run_dir)
    assert "reft doctor --clean" in before.stdout and dead_agent.exists()
    done = reft("doctor", "--clean", run_dir=run_dir)
    listed = [line.removeprefix("removed ") for line in done.stdout.splitlines() if line.startswith("removed ")]
    names = ["agent.sock", "agent.log", "agent.lock"]
    assert listed == [*(str(dead_agent / name) for name in names), str(dead_agent), str(dead_agent.parent)]
    assert run_dir.exists() and not dead_agent.parent.exists()
    again = reft("doctor", "--clean", "--json", run_dir=run_dir)
    assert json.loads(again.stdout)["removed"] == []


def test_doctor_keeps_hang_reports_and_foreign_files(run_dir: Path, dead_agent: Path) -> None:
    (dead_agent / "verdicts").mkdir()
    (dead_agent.parent / "notes.txt").touch()
    removed = json.loads(reft("doctor", "--clean", "--json", run_dir=run_dir).stdout)["removed"]
    assert removed == [str(dead_agent / "agent.sock"), str(dead_agent / "agent.lock")]
    assert (dead_agent / "agent.log").exists() and (dead_agent.parent / "notes.txt").exists()


def test_doctor_leaves_a_living_agent_alone(run_dir: Path, dead_agent: Path) -> None:
    with (dead_agent / "agent.lock").open() as lock:  # as the agent does, also while it is stopped
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert json.loads(reft("doctor", "--clean", "--json", run_dir=run_dir).stdout)["removed"] == []
    assert (dead_agent / "agent.sock").exists()


def test_doctor_follows_no_link_and_removes_no_file_named_like_a_socket(
    run_dir: Path, dead_agent: Path
) -> None:
    (run_dir / "linked").symlink_to(dead_agent.parent)
    other = run_dir / "other" / "node-0"
    other.mkdir(parents=True)
    (other / "agent.sock").write_text("a file")
    removed = json.loads(reft("doctor", "--clean", "--json", run_dir=run_dir).stdout)["removed"]
    assert all(path.startswith(str(dead_agent.parent)) for path in removed) and len(removed) == 5
    assert (other / "agent.sock").read_text() == "a file" and (run_dir / "linked").is_symlink()


def test_doctor_names_unknown_and_malformed_settings(run_dir: Path) -> None:
    native_module()
    done = reft("doctor", "--json", run_dir=run_dir, env={"REFT_SNAPSHOT_SLOT": "2", "REFT_SNAPSHOT_EVERY": "often"})
    settings = [finding for finding in json.loads(done.stdout)["findings"] if finding["check"] == "settings"]
    assert any(finding["todo"] == "did you mean REFT_SNAPSHOT_SLOTS?" for finding in settings)
    assert any("often" in finding["text"] and finding["result"] == "fail" for finding in settings)
    assert done.returncode == 1


@pytest.mark.parametrize(("name", "check"), [("REFT_RUN_DIR", "run dir"), ("REFT_VAULT_DIR", "vault dir")])
def test_doctor_refuses_relative_directories(run_dir: Path, name: str, check: str) -> None:
    done = reft("doctor", "--json", run_dir=run_dir, env={name: "some/place"})
    (finding,) = [finding for finding in json.loads(done.stdout)["findings"] if finding["check"] == check]
    assert finding["result"] == "fail" and finding["todo"] == f"set {name}={Path('some/place').absolute()}"
    assert done.returncode == 1


def test_doctor_names_a_job_id_that_is_changed(run_dir: Path) -> None:
    native_module()
    for given, changed in (("a/b", True), (".hidden", True), ("x" * 101, True), ("x" * 100, False), ("a.b-c_1", False)):
        done = reft("doctor", "--json", run_dir=run_dir, env={"REFT_JOB_ID": given})
        said = [finding for finding in json.loads(done.stdout)["findings"] if "the job is named" in finding["text"]]
        assert len(said) == changed, given
        assert all(finding["result"] == "warn" and finding["todo"] for finding in said)


def test_a_job_is_found_by_the_id_it_was_given(run_dir: Path) -> None:
    from reft._link import job_identity

    fake = FakeAgent(run_dir, job_identity.safe_id("team/a"))
    fake.answers[50] = (51, status())
    for job in ("team/a", job_identity.safe_id("team/a")):
        done = reft("top", "--once", "--job", job, run_dir=run_dir)
        assert done.returncode == 0, done.stderr
    fake.close()


def test_doctor_reports_an_agent_that_does_not_run(run_dir: Path, tmp_path: Path) -> None:
    broken = tmp_path / "reft-agent"
    broken.write_text("#!/bin/sh\necho cannot >&2\nexit 4\n")
    broken.chmod(0o755)
    done = reft("doctor", "--json", run_dir=run_dir, env={"REFT_AGENT_PATH": str(broken)})
    (finding,) = [finding for finding in json.loads(done.stdout)["findings"] if finding["check"] == "agent"]
    assert finding["result"] == "fail"
    assert "cannot" in finding["text"]


def test_doctor_finds_the_agent_that_is_installed(run_dir: Path) -> None:
    native_module()
    done = reft("doctor", "--json", run_dir=run_dir)
    (finding,) = [finding for finding in json.loads(done.stdout)["findings"] if finding["check"] == "agent"]
    assert finding["result"] == "ok" and finding["text"].startswith("reft-agent "), finding


def test_simulate_compares_the_policies(run_dir: Path, tmp_path: Path) -> None:
    native_module()
    page = tmp_path / "page.html"
    done = reft("simulate", "--steps", "16", "--html", str(page), "--json", run_dir=run_dir)
    rows = {row["variant"]: row for row in json.loads(done.stdout)["rows"]}
    assert list(rows) == ["none", "gap", "eager", "sync", "paper"], done.stderr
    # Four stages have bubbles enough: their copies cost nothing, those at the program point their
    # whole length.
    assert rows["gap"]["share"]["gap"] > 0.95 and rows["sync"]["share"]["at once"] == 1
    assert rows["gap"]["overhead"] < rows["eager"]["overhead"] < rows["sync"]["overhead"]
    assert page.read_text().count("<rect") == 4
    nowhere = reft(
        "simulate", "--steps", "12", "--policy", "gap", "--html", str(tmp_path / "no" / "page.html"), run_dir=run_dir
    )
    assert nowhere.returncode == 1 and nowhere.stderr.startswith("reft: cannot write "), nowhere.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--stages", "0"], "'--stages': 0 is not in the range"),
        (["--stages", "1024", "--replicas", "100"], "102400 ranks, but the limit is 10240"),
        (["--jitter", "nan"], "'--jitter': nan is not a finite number"),
        (["--forward-ms", "inf"], "'--forward-ms': inf is not in the range"),
        (["--schedule", "interleaved", "--micro-batches", "6"], "micro-batches to be a multiple of its stages"),
    ],
)
def test_simulate_says_what_is_wrong(run_dir: Path, arguments: list[str], said: str) -> None:
    native_module()
    done = reft("simulate", *arguments, run_dir=run_dir)
    assert done.returncode == 2 and said in " ".join(done.stderr.split()), done.stderr
    assert "Traceback" not in done.stderr


def test_verify_and_ls_of_something_that_is_no_vault(folder: Path) -> None:
    native_module()
    (folder / "rank-0.vault").write_bytes(b"x" * 10000)
    for command in ("ls", "verify"):
        done = reft(command, "--vault-dir", str(folder))
        assert done.returncode == 1, done.stderr
        assert "rank-0.vault" in done.stdout
        assert "Traceback" not in done.stderr
    empty = folder / "empty"
    empty.mkdir()
    assert reft("ls", "--vault-dir", str(empty)).returncode == 3


@pytest.mark.parametrize("command", ["ls", "verify", "report"])
def test_nobody_waits_for_the_writer_of_a_fifo(folder: Path, command: str) -> None:
    os.mkfifo(folder / "node.vault")
    done = reft(command, "--vault-dir", str(folder))
    assert done.returncode in (1, 3) and "node.vault" in done.stdout + done.stderr, done.stdout + done.stderr


def snapshot_engine(
    run_dir: Path, path: Path, policy: str = "eager", store: Any = None, **more: str
) -> Any:
    """The engine of rank 0, with its vault at `path`; with a store, of a job of two nodes."""
    native = native_module()
    path.parent.mkdir(parents=True, exist_ok=True)
    client = native.AgentClient(
        str(run_dir / "demo" / "node-0" / "agent.sock"), json.dumps({"role": "rank", "rank": 0}), 10000
    )
    settings = {
        "REFT_OP_LOG_RECORDS": "256",
        "REFT_SNAPSHOT_CHUNK_BYTES": "64K",
        "REFT_SNAPSHOT_CONTROL_EVERY": "0",
        "REFT_SNAPSHOT_POLICY": policy,
        "REFT_SNAPSHOT_THREADS": "1",
    } | more
    with pytest.MonkeyPatch.context() as patch:
        for name, value in settings.items():
            patch.setenv(name, value)
        return native.Rank(
            client=client,
            job="demo",
            rank=0,
            world=1,
            node=0,
            nodes=1 if store is None else 2,
            domain_of=[0],
            attempt=0,
            incarnation=5,
            overhead_percent=0,
            store=store,
            seal=native.ValueSeal(bytes(32), "attempt", 1),
            path=str(path),
        )


@pytest.fixture
def vault(agent: FakeAgent, run_dir: Path, folder: Path) -> Path:
    """A vault file with one snapshot of 1 MiB, as a rank leaves it."""
    native_module()
    import torch

    return sealed(run_dir, folder, torch.arange(262144, dtype=torch.float32))


def sealed(run_dir: Path, folder: Path, tensor: Any, is_replaceable: bool = False) -> Path:
    path = folder / "vaults" / "demo" / "rank-0.vault"
    engine = snapshot_engine(run_dir, path)
    engine.set_table([("weight", tensor, -1, False, is_replaceable)], [])
    engine.capture(7, [tensor], b"objects", [], [])
    engine.gate()
    engine.drain(10000)
    return path


@pytest.mark.parametrize(("is_replaceable", "only_here"), [(False, "weight"), (True, "")])
def test_an_inventory_names_what_no_other_rank_can_replace(
    agent: FakeAgent, run_dir: Path, folder: Path, is_replaceable: bool, only_here: str
) -> None:
    native = native_module()
    import torch

    with sealed(run_dir, folder, torch.ones(8), is_replaceable).open("rb") as vault:
        text, faults = native.inventory_of(vault.fileno(), 0)
    (slot,) = json.loads(text)["vaults"][0]["slots"]
    assert slot[6] == only_here and not faults


def test_a_second_engine_in_one_process_is_refused(agent: FakeAgent, run_dir: Path, folder: Path) -> None:
    """They would listen to the ops of one process, and take each other's wake-ups."""
    native = native_module()
    first = snapshot_engine(run_dir, folder / "vaults" / "rank-0.vault")
    with pytest.raises(native.Unavailable, match="end the first session"):
        snapshot_engine(run_dir, folder / "vaults" / "rank-1.vault")
    del first
    snapshot_engine(run_dir, folder / "vaults" / "rank-1.vault")


def test_an_engine_that_cannot_be_made_is_left_by_the_op_log(agent: FakeAgent, run_dir: Path, folder: Path) -> None:
    """Its vault, into which the log had moved, is no longer mapped."""
    native = native_module()
    import torch.distributed as dist

    class Unclonable(dist.Store):  # type: ignore[misc]
        def clone(self) -> Any:
            raise RuntimeError("this store has no second connection")

    with pytest.raises(RuntimeError, match="no second connection"):
        snapshot_engine(run_dir, folder / "vaults" / "rank-0.vault", store=Unclonable())
    native.log_step(0, 1)
    snapshot_engine(run_dir, folder / "vaults" / "rank-1.vault")


def test_ls_and_verify_of_a_vault_file(vault: Path) -> None:
    root = str(vault.parent.parent)
    listed = reft("ls", "--vault-dir", root)
    assert listed.returncode == 0, listed.stderr
    assert "sealed" in listed.stdout and " 7 " in listed.stdout and "1.0 MiB" in listed.stdout
    (listing,) = json.loads(reft("ls", "--vault-dir", root, "--json").stdout)["vaults"]
    assert (listing["job"], listing["slots"][0]["step"], listing["slots"][0]["regions"]) == ("demo", 7, 1)
    verified = reft("verify", "--vault-dir", root)
    assert verified.returncode == 0, verified.stdout
    assert "step 7: ok" in verified.stdout
    assert reft("ls", "--vault-dir", root, "--job", "other").returncode == 3


def inside(*arguments: str) -> Result:
    """As `reft`, in this process."""
    from reft._cli.main import cli

    return CliRunner().invoke(cli, arguments)


def test_entries_that_are_no_vaults_hide_none(vault: Path) -> None:
    root = str(vault.parent.parent)
    names = ("folder", "fifo", "socket")
    folder, fifo, listener = (vault.with_name(f"{name}.vault") for name in names)
    folder.mkdir()
    os.mkfifo(fifo)
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(listener))
    for command in ("ls", "verify"):
        done = inside(command, "--vault-dir", root, "--json")
        report = json.loads(done.stdout)
        assert done.exit_code == 0, done.stdout
        assert [entry["job"] for entry in report["vaults"]] == ["demo"]
        assert {entry["path"]: entry["what"] for entry in report["foreign"]} == {
            str(folder): "a directory",
            str(fifo): "a FIFO, a socket or a device",
            str(listener): "a FIFO, a socket or a device",
        }
        done = inside(command, "--vault-dir", root)
        printed = " ".join(done.stdout.split())
        assert done.exit_code == 0 and "not a vault but a directory" in printed, done.stdout
        assert ("sealed" if command == "ls" else "step 7: ok") in done.stdout


def test_files_that_cannot_be_checked_hide_none_and_are_wrong(vault: Path) -> None:
    root = str(vault.parent.parent)
    vault.with_name("rank-1.vault").write_bytes(b"x" * 10000)
    vault.with_name("rank-2.vault").symlink_to("nowhere")
    for command in ("ls", "verify"):
        done = inside(command, "--vault-dir", root, "--json")
        good, *bad = json.loads(done.stdout)["vaults"]
        assert done.exit_code == 1 and good["job"] == "demo" and "error" not in good, done.stdout
        assert [bool(entry["error"]) for entry in bad] == [True, True]


def test_verify_finds_a_flipped_bit_and_where(vault: Path) -> None:
    content = bytearray(vault.read_bytes())
    at = content.rindex(struct.pack("<f", 100000.0))  # in chunk 100000 * 4 // 65536 = 6
    content[at] ^= 1
    vault.write_bytes(content)
    done = reft("verify", "--vault-dir", str(vault))
    assert done.returncode == 1
    assert "corrupt, 1 of 16 chunks" in done.stdout
    assert f"chunk at byte {6 * 65536}" in done.stdout
    result = json.loads(reft("verify", "--vault-dir", str(vault), "--json").stdout)
    assert not result["ok"]
    assert result["vaults"][0]["slots"][0]["faults"][0]["payload_offset"] == 6 * 65536


def test_a_slot_with_a_torn_header_is_damaged_not_gone(vault: Path) -> None:
    content = bytearray(vault.read_bytes())
    at = content.index(struct.pack("<Q", 0x31544C5354464552))
    content[at + 56] ^= 0xFF  # table_bytes
    vault.write_bytes(content)
    listed = reft("ls", "--vault-dir", str(vault))
    assert listed.returncode == 1
    assert "damaged" in listed.stdout
    verified = reft("verify", "--vault-dir", str(vault))
    assert verified.returncode == 1
    assert "corrupt: header, table or objects" in verified.stdout


def test_ls_and_verify_ask_the_agent(vault: Path, agent: FakeAgent, run_dir: Path) -> None:
    agent.fds[0] = os.open(vault, os.O_RDONLY)
    agent.answers[12] = (
        13,
        {"vaults": [{"rank": 0, "bytes": vault.stat().st_size, "path": "", "live": True, "slots": []}]},
    )
    listed = reft("ls", run_dir=run_dir)
    assert listed.returncode == 0, listed.stderr
    assert "sealed" in listed.stdout
    assert "step 7: ok" in reft("verify", run_dir=run_dir).stdout


@pytest.mark.parametrize("protection", ["none", "arc"])
def test_the_protection_of_the_setting_is_that_of_the_snapshot(
    agent: FakeAgent, run_dir: Path, folder: Path, protection: str
) -> None:
    native = native_module()
    import torch

    engine = snapshot_engine(
        run_dir, folder / "rank-0.vault", REFT_SNAPSHOT_PROTECTION=protection
    )
    tensor = torch.ones(16)
    engine.set_table([("weight", tensor, -1, False, True)], [])
    engine.capture(1, [tensor], b"", [], [])
    engine.gate()
    engine.drain(10000)
    (slot,) = native.list_vault(engine.fd)["slots"]
    assert slot["protection"] == protection
