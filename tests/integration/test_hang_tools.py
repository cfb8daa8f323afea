"""What is left of a hang for those who look at it: the verdict on the terminal of the job, replayed, and as a page."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from reft._cli.main import cli
from tests.support.launchers import job_environment, torchrun

pytest.importorskip("torch")
pytest.importorskip("click")
_C = pytest.importorskip("reft._C", reason="needs the native module")


PACKAGE = Path(_C.__file__).resolve().parent
pytestmark = pytest.mark.skipif(
    not os.access(os.environ.get("REFT_AGENT_PATH") or PACKAGE / "bin" / "reft-agent", os.X_OK),
    reason="needs reft-agent",
)

SCRIPT = """
import time
import torch
import torch.distributed as dist

dist.init_process_group("reft")
rank = dist.get_rank()


def load_batch(step):
    if rank == 2 and step == 5:
        time.sleep(600)


for step in range(100):
    load_batch(step)
    dist.all_reduce(torch.ones(4))
"""


def reft(*arguments: str | Path) -> Result:
    return CliRunner().invoke(cli, [str(argument) for argument in arguments])


@dataclass
class Hung:
    """A job of three ranks that has hung and was ended."""

    path: Path  # of the verdict
    output: str

    @property
    def report(self) -> dict[str, Any]:
        return dict(json.loads(self.path.read_bytes()))


@pytest.fixture(scope="module")
def hung(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hung]:
    root = tmp_path_factory.mktemp("hung")
    script, output = root / "train.py", root / "output"
    script.write_text(SCRIPT)
    command = torchrun(script, ranks=3)
    with output.open("wb") as sink:
        job = subprocess.Popen(command, env=job_environment(root, REFT_HANG_SUSPECT_SEC="2"), stdout=sink, stderr=sink)
        try:
            deadline = time.monotonic() + 120
            folder = root / "run" / "job" / "node-0" / "verdicts"
            # The text is written after the JSON.
            while not (found := list(folder.glob("*.txt"))):
                assert time.monotonic() < deadline and job.poll() is None, output.read_text()
                time.sleep(0.1)
        finally:
            job.terminate()  # torchrun ends its ranks, which have sessions of their own
            try:
                job.wait(timeout=40)
            except subprocess.TimeoutExpired:
                job.kill()
                job.wait()
    yield Hung(found[0].with_suffix(".json"), output.read_text(errors="replace"))


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A verdict on evidence that is made up: ranks 0 and 1 wait in all_reduce 6, rank 2 loads data."""
    second = 1_000_000_000
    ranks = []
    for rank in range(3):
        tail = []
        for seq in range(1, 6 if rank == 2 else 7):
            op = {
                "kind": 2,
                "group_index": 0,
                "seq": seq,
                "ticket": seq,
                "bytes": 16,
                "signature": 7,
                "call_site_id": 0,
            }
            begin = (900 + seq) * second
            op |= {"begin_ns": begin, "enqueued_ns": begin + 1000, "wait_begin_ns": begin + 2000, "peer": -1}
            op |= {"wait_end_ns": begin + 5000, "done_ns": begin + 5000} if seq < 6 else {}
            tail.append(op)
        where = "load_batch" if rank == 2 else "train"
        stack = f'Current thread 0x0000000000000002 (most recent call first):\n  File "/home/u/train.py", line 12 in {where}\n'
        entry = {
            "rank": rank,
            "pid": 100 + rank,
            "host": "n0",
            "alive": True,
            "answered": True,
            "proc_state": "S",
            "tail": tail,
        }
        entry |= {
            "groups": [{"name": "default_pg", "rank": rank, "size": 3}],
            "ops_begun": len(tail),
            "stacks_text": stack,
        }
        ranks.append(entry | {"heartbeat_age_ns": 94 * second})
    evidence = {"report": "hang", "version": _C.verdict_version, "job": "demo", "world": 3, "now_ns": 1000 * second}
    path = tmp_path_factory.mktemp("written") / "verdict.json"
    path.write_bytes(_C.replay_verdict(json.dumps({**evidence, "suspect_sec": 30, "ranks": ranks}).encode()))
    path.with_suffix(".txt").write_text("text")
    return path


def decided(report: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in report.items() if key not in ("ranks", "text", "screen")}


def test_the_verdict_reaches_the_terminal_of_the_job_on_one_screen(hung: Hung) -> None:
    lines = hung.output.splitlines()
    begin = next(number for number, line in enumerate(lines) if line.startswith("reft: job job: hang, "))
    end = next(number for number, line in enumerate(lines) if str(hung.path.with_suffix(".txt")) in line)
    screen = lines[begin : end + 1]
    assert len(screen) <= 24 and max(map(len, screen[:-1])) <= 80, screen
    assert any(line.startswith("culprit: rank 2") for line in screen)
    assert any(line.startswith("next: ") for line in screen)
    # By one rank, once.
    assert sum(line.startswith("reft: job job: hang, ") for line in lines) == 1


@pytest.mark.parametrize("real", [False, True])
def test_replaying_a_verdict_gives_the_same_verdict(real: bool, request: pytest.FixtureRequest) -> None:
    path: Path = request.getfixturevalue("hung").path if real else request.getfixturevalue("written")
    report = json.loads(path.read_bytes())
    assert report["state"] == "hang"
    assert [culprit["rank"] for culprit in report["culprits"]] == [2]
    assert report["culprits"][0]["frame"]["function"] == "load_batch"
    done = reft("replay", "--json", path)
    assert done.exit_code == 0, done.stderr
    assert json.loads(done.stdout) == report
    done = reft("replay", path)
    assert (done.exit_code, done.stdout, done.stderr) == (0, report["screen"], "")


def test_replaying_takes_nothing_but_the_evidence(written: Path, tmp_path: Path) -> None:
    changed = json.loads(written.read_bytes())
    changed["culprits"] = [{**changed["culprits"][0], "rank": 0}]
    changed["screen"] = changed["class"] = "made up"
    path = tmp_path / "changed.json"
    path.write_text(json.dumps(changed))
    done = reft("replay", "--json", path)
    assert done.exit_code == 1
    assert decided(json.loads(done.stdout)) == decided(json.loads(written.read_bytes()))
    assert 'class was "made up"' in done.stderr

    # Without the stack, the place is not known any more; so it is the evidence that is read.
    less = json.loads(written.read_bytes())
    less["ranks"][2]["stacks_text"] = ""
    path.write_text(json.dumps({"agents": [less]}))
    done = reft("replay", "--json", path)
    assert done.exit_code == 1
    (again,) = json.loads(done.stdout)["agents"]
    assert again["culprits"][0]["rank"] == 2 and again["culprits"][0]["frame"] is None


def test_replay_of_what_is_no_report_is_one_clear_error(written: Path, tmp_path: Path) -> None:
    whole = written.read_bytes()
    older = {**json.loads(written.read_bytes()), "version": 1}
    bare = copy.deepcopy(json.loads(written.read_bytes()))
    del bare["ranks"]
    cases = {
        "cut off": whole[: len(whole) // 2],
        "is cut off: it ends after": whole[: whole.index(b"screen") + 40],
        "has an entry that is not a rank": json.dumps({**older, "version": 2, "ranks": [1, 2]}).encode(),
        "not a hang report: no JSON": b"\x80\x04 pickle",
        "is not a hang report; hang reports are": b'{"loss": 3}',
        "contains no report": b'{"agents": []}',
        "of version 1; this reft reads": json.dumps(older).encode(),
        "without evidence": json.dumps(bare).encode(),
        "is not a hang report": b"[" * 100_000,
        "of version 2.0; this reft reads": json.dumps({**older, "version": 2.0}).encode(),
        "Infinity is no JSON": json.dumps({**older, "version": 2, "now_ns": float("inf")}).encode(),
    }
    for number, (expected, content) in enumerate(cases.items()):
        path = tmp_path / f"{number}.json"
        path.write_bytes(content)
        done = reft("replay", path)
        assert done.exit_code == 1 and done.stdout == "", expected
        assert expected in done.stderr and len(done.stderr.splitlines()) == 1, done.stderr
    done = reft("replay", written.with_suffix(".txt"))
    assert done.exit_code == 1 and f"its evidence is in {written}" in done.stderr
    done = reft("replay", tmp_path / "absent.json")
    assert done.exit_code == 3 and "No such file" in done.stderr


@pytest.mark.parametrize("real", [False, True])
def test_replay_writes_a_page(real: bool, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    path: Path = request.getfixturevalue("hung").path if real else request.getfixturevalue("written")
    done = reft("replay", path, "--html", tmp_path / "verdict.html")
    assert done.exit_code == 0, done.stderr
    page = (tmp_path / "verdict.html").read_text()
    for expected in ("rank 2", "train.py:12 in load_batch", "all_reduce seq ", "not begun by rank 2", "ranks 0 1"):
        assert expected in page, expected
    done = reft("replay", path, "--html", tmp_path / "absent" / "verdict.html")
    assert done.exit_code == 1 and "cannot write" in done.stderr


RESUMED = """
import atexit, os, signal, sys, time
import torch
import torch.distributed as dist

dist.init_process_group("reft")
rank = dist.get_rank()
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


def evaluate():
    end = time.monotonic() + 12
    while time.monotonic() < end:
        torch.ones(100).sum()


if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    atexit.register(print, f"exit handlers of rank {rank} run", flush=True)
for step in range(12):
    print(f"attempt {os.environ['TORCHELASTIC_RESTART_COUNT']} rank {rank} step {step}", flush=True)
    # Not a variable: those come back with the loop.
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and rank == 1 and step == 8:
        {"sleep": lambda: time.sleep(600), "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP), "evaluate": evaluate}[sys.argv[1]]()
    optimizer.zero_grad()
    try:
        model(torch.ones(2, 4)).sum().backward()
    except Exception as error:
        print(f"rank {rank} goes on after an aborted op: {error}", flush=True)
        raise
    optimizer.step()
dist.destroy_process_group()
"""


MISMATCHED = """
import os, time
import torch, torch.distributed as dist

dist.init_process_group("reft")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


def metrics(step):
    # Once only: afterwards the job goes on.
    wrong = dist.get_rank() == 1 and step == 3 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    if wrong:
        time.sleep(0.5)  # the others are in it: two of three are a majority
    dist.all_reduce(torch.zeros(5000 if wrong else 10))


for step in range(8):
    optimizer.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    metrics(step)
dist.destroy_process_group()
"""


def test_ranks_that_end_in_an_op_they_disagree_about(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(MISMATCHED)
    command = torchrun(script, ranks=3, options=("--standalone", "--max-restarts=1"))
    job = subprocess.run(
        command, env=job_environment(tmp_path, REFT_AGENT_LINGER_SEC="60"), capture_output=True, text=True, timeout=240
    )
    text = job.stdout + job.stderr
    assert job.returncode == 0, text
    # Whichever of the others gloo has ended: the one with the other size is named, once, with the
    # place in the code of both sides.
    (verdict,) = (tmp_path / "run" / "job" / "node-0" / "verdicts").glob("*.json")
    report = json.loads(verdict.read_bytes())
    assert report["class"] == "size_mismatch" and [culprit["rank"] for culprit in report["culprits"]] == [1], report
    line = next(number for number, text in enumerate(MISMATCHED.splitlines(), 1) if "dist.all_reduce" in text)
    (said,) = (sentence for sentence in report["evidence"] if "ranks disagree" in sentence)
    assert said.count(f"train.py:{line} metrics") == 2 and "rank 1 calls all_reduce (19.5 KiB" in said, said
    # The next attempt says it again, for whoever was gone before it was printed.
    assert "why the previous ranks ended:" in text and "culprit: rank 1" in text, text


DISAGREEING = """
import time
import torch
import torch.distributed as dist

dist.init_process_group("reft")
rank = dist.get_rank()
for step in range(int(dist.get_world_size()) * 20):
    wrong = rank == 2 and step >= 10
    dist.all_reduce(torch.ones(64, dtype=torch.int32 if wrong else torch.float32))
    time.sleep(0.05)
print("ended", flush=True)
dist.destroy_process_group()
"""


def test_ranks_that_disagree_and_do_not_hang_are_told_so_once(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(DISAGREEING)
    job = subprocess.run(
        torchrun(script, ranks=3), env=job_environment(tmp_path), capture_output=True, text=True, timeout=240
    )
    text = job.stdout + job.stderr
    assert job.returncode == 0 and text.count("ended") == 3, text
    said = "".join(text.split())  # long lines are broken at the 80th column
    line = next(number for number, text in enumerate(DISAGREEING.splitlines(), 1) if "dist.all_reduce" in text)
    place = f"{tmp_path.name}/train.py:{line} <module>"
    expected = (
        f"rank 2 calls all_reduce (256 B, int32) at {place} ranks 0 1 call all_reduce (256 B, float32) at {place}"
    )
    assert said.count("ranksdisagreeaboutanop") == 1, text
    assert "".join(expected.split()) in said, text
    assert not (tmp_path / "run" / "job" / "node-0" / "verdicts").exists(), "nothing hung"


ANEW = """
import gc
import time
import torch
import torch.distributed as dist

gc.disable()  # what refers to itself stays
for pair in ([0, 1], [1, 2], [0, 2]):
    dist.init_process_group("reft")
    rank = dist.get_rank()
    group = dist.new_group(pair)  # torch counts anew: it is called as the one before
    for _ in range(40):
        if rank in pair:
            values = torch.ones(3 + len(pair) * pair[1])
            dist.all_reduce(values, group=group) if pair[0] == 0 else dist.broadcast(values, pair[0], group=group)
        dist.barrier()
        time.sleep(0.02)
    dist.destroy_process_group()
print("ended", flush=True)
"""


def test_groups_that_are_made_anew_in_one_process_are_others(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(ANEW)
    job = subprocess.run(
        torchrun(script, ranks=3), env=job_environment(tmp_path), capture_output=True, text=True, timeout=240
    )
    text = job.stdout + job.stderr
    assert job.returncode == 0 and text.count("ended") == 3, text
    # Of two sessions of a process, the agent would drop one for the other for ever.
    assert "disagree" not in text and "no connection to the agent" not in text, text


def test_who_is_at_work_while_the_others_wait_as_always_is_not_ended(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(RESUMED)
    command = torchrun(script, "evaluate", ranks=2, options=("--standalone", "--max-restarts=1"))
    environment = job_environment(tmp_path, REFT_HANG_SUSPECT_SEC="3", REFT_HANG_ACTION="abort")
    job = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    text = job.stdout + job.stderr
    assert job.returncode == 0, text
    assert "attempt 0 rank 0 step 11" in text and "attempt 1" not in text and "the ranks end now" not in text, text
    # It was found, as what it is.
    assert "job job: slow, busy" in text, text


@pytest.mark.parametrize("fault", ["sleep", "stop"])
def test_a_hung_job_resumes_by_itself(fault: str, tmp_path: Path) -> None:
    script, output = tmp_path / "train.py", tmp_path / "output"
    script.write_text(RESUMED)
    command = torchrun(script, fault, ranks=2, options=("--standalone", "--max-restarts=1"))
    environment = job_environment(
        tmp_path, REFT_HANG_SUSPECT_SEC="3", REFT_HANG_ACTION="abort", REFT_AGENT_LINGER_SEC="60"
    )
    with output.open("wb") as sink:
        job = subprocess.Popen(command, env=environment, stdout=sink, stderr=sink)
        try:
            job.wait(timeout=240)
        finally:
            job.terminate()
            job.wait(timeout=60)
    text = output.read_text(errors="replace")
    assert job.returncode == 0, text
    # A busy machine may have stood still for 3 s elsewhere, and that is a report too.
    written = sorted((tmp_path / "run" / "job" / "node-0" / "verdicts").glob("*.json"))
    reports = [json.loads(path.read_bytes()) for path in written]
    report = next((it for it in reports if [culprit["rank"] for culprit in it["culprits"]] == [1]), None)
    assert report is not None and report["state"] == "hang", text
    assert "the ranks end now" in text and "next: " in text
    if fault == "stop":  # read from outside: it cannot answer
        (culprit,) = report["culprits"]
        assert culprit["reason"] == "stopped" and Path(culprit["frame"]["file"]).name == "train.py", report
        line = next(number for number, text in enumerate(RESUMED.splitlines(), 1) if "SIGSTOP" in text)
        assert culprit["frame"]["line"] == line, report
    assert "if nothing moves within 2 s, the ranks end" in text
    assert "exitcode: 75" in " ".join(text.split()).replace("exitcode : 75", "exitcode: 75"), text
    assert "goes on after an aborted op" not in text and "exit handlers of rank" not in text
    # Memory is restored: the second attempt does not begin from the beginning, and neither does it
    # leave out a step.
    for rank in (0, 1):
        begin = f"attempt 1 rank {rank} step "
        steps = [int(line.removeprefix(begin)) for line in text.splitlines() if line.startswith(begin)]
        assert steps[-1] == 11 and len(steps) < 12 and steps[1:] == list(range(steps[1], 12)), text
        assert 7 <= steps[1] <= 9, text
