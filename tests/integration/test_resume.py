"""What a restarted script gets back: everything, state only, or nothing; and what is said when it is not the same script."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.launchers import Forkrun, TrainJob, agent_pids, kill_all, rank_pids, torchrun

pytestmark = pytest.mark.exact
HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]


MODELS = ["ddp", "fsdp", "plain", "two"]


@pytest.fixture(scope="module")
def forkrun() -> Iterator[Forkrun]:
    launcher = Forkrun()
    yield launcher
    launcher.close()


@pytest.fixture
def job(forkrun: Forkrun, folder: Path) -> Iterator[TrainJob]:
    job = TrainJob(forkrun, folder, "resume", max_restarts=2)
    yield job
    job.end()


def resumed(job: TrainJob) -> int | None:
    """The step that reft says it resumed at; None if it did not."""
    found = re.findall(r"resumed at step (\d+)", job.said)
    return int(found[-1]) if found else None


@pytest.mark.timeout(120)
@pytest.mark.parametrize("model", MODELS)
def test_exact(forkrun: Forkrun, job: TrainJob, folder: Path, model: str) -> None:
    reference = TrainJob(forkrun, folder, "reference").start("--model", model, backend="gloo")
    assert reference.wait() == 0, reference.said
    job.start("--model", model, "--delay", "0.01").until_step(9)
    job.kill_ranks(1)
    assert job.wait() == 0, job.said
    assert resumed(job) is not None, job.said
    step = job.losses(0, 1)[0][0]
    # -1: killed after its optimizer step and before the line that tells it.
    assert -1 <= min(job.losses(rank, 0)[-1][0] for rank in range(2)) - step <= 1
    for rank in range(2):
        losses = dict(reference.losses(rank))
        assert all(losses[s] == loss for attempt in (0, 1) for s, loss in job.losses(rank, attempt))
        assert job.losses(rank, 1)[0][0] == step
    assert job.finals() == reference.finals()


@pytest.mark.timeout(120)
def test_off(job: TrainJob) -> None:
    job.start("--delay", "0.01", REFT_RESUME="off").until_step(9)
    job.kill_ranks(0)
    assert job.wait() == 0, job.said
    assert resumed(job) is None
    # From the beginning, exactly as before.
    again = dict(job.losses(0, 1))
    assert again[1] == dict(job.losses(0, 0))[1] and len(again) == 24


@pytest.mark.timeout(120)
def test_a_start_without_snapshots_keeps_those_that_it_does_not_use(
    forkrun: Forkrun, job: TrainJob, folder: Path
) -> None:
    vaults = folder / "vaults"
    first = TrainJob(forkrun, folder, job.job).start("--delay", "0.03", REFT_VAULT_DIR=str(vaults))
    first.until_step(10)
    kill_all(first.agents)
    first.kill_ranks()
    first.wait()
    files = sorted(vaults.rglob("*.vault"))
    for kill in (True, False):
        off = TrainJob(forkrun, folder, job.job).start(
            "--delay", "0.03", REFT_VAULT_DIR=str(vaults), REFT_SNAPSHOT="0"
        )
        off.until_step(4)
        assert len(off.lines("has a snapshot of step", "REFT_SNAPSHOT=0")) == 1, off.said
        assert "continues" not in off.said and resumed(off) is None, off.said
        assert off.losses(0)[0][0] == 1 and sorted(vaults.rglob("*.vault")) == files
        if kill:
            off.kill_ranks()
            off.wait()
            continue
        assert off.wait() == 0, off.said
    again = TrainJob(forkrun, folder, job.job).start(REFT_VAULT_DIR=str(vaults))
    assert again.wait() == 0, again.said
    assert resumed(again) is None, again.said


def test_a_start_without_snapshots_leaves_them_to_the_next_one(
    forkrun: Forkrun, job: TrainJob, folder: Path
) -> None:
    """While the agent holds them."""
    first = TrainJob(forkrun, folder, job.job).start("--delay", "0.03", REFT_AGENT_LINGER_SEC="60")
    first.until_step(10).kill_ranks()
    first.wait()
    off = TrainJob(forkrun, folder, job.job).start("--delay", "0.03", REFT_SNAPSHOT="0")
    off.until_step(4).kill_ranks()
    off.wait()
    again = TrainJob(forkrun, folder, job.job).start()
    assert again.wait() == 0, again.said
    step = resumed(again)
    assert step is not None and step >= 9, again.said


def test_state_only(job: TrainJob) -> None:
    """Weights and random state come back; the loop begins again, so more steps are done than asked for in all."""
    job.start("--delay", "0.01", REFT_RESUME="state").until_step(9)
    job.kill_ranks(0)
    assert job.wait() == 0, job.said
    assert resumed(job) is not None
    log = job.losses(1, 1)
    assert [step for step, _ in log] == list(range(1, 25))
    assert log[1][1] != dict(job.losses(1, 0))[2]


@pytest.mark.timeout(120)
def test_changed_script_starts_from_the_beginning(forkrun: Forkrun, job: TrainJob, folder: Path) -> None:
    """Other widths: what was saved does not fit, and that is said with the first tensor's name and shapes."""
    vaults = folder / "vaults"
    vaults.mkdir()
    job.start("--delay", "0.01", REFT_VAULT_DIR=str(vaults)).until_step(9)
    os.kill(forkrun.pid, signal.SIGKILL)
    job.kill_ranks()
    job.wait()
    again = TrainJob(forkrun, folder, "resume").start("--width", "64", REFT_VAULT_DIR=str(vaults))
    assert again.wait() == 0, again.said
    assert resumed(again) is None
    lines = again.lines("has changed")
    assert lines and "[96" in lines[0] and "[64" in lines[0], again.said
    reference = TrainJob(forkrun, folder, "reference").start("--width", "64", backend="gloo")
    assert reference.wait() == 0
    assert again.finals() == reference.finals()


@pytest.mark.timeout(120)
def test_new_launcher_finds_files_of_the_old_one(forkrun: Forkrun, job: TrainJob, folder: Path) -> None:
    """REFT_JOB_ID and REFT_VAULT_DIR: launcher, agent and ranks may all be gone."""
    reference = TrainJob(forkrun, folder, "reference").start(backend="gloo")
    assert reference.wait() == 0
    vaults = folder / "vaults"
    vaults.mkdir()
    job.start("--delay", "0.01", REFT_VAULT_DIR=str(vaults)).until_step(9)
    os.kill(forkrun.pid, signal.SIGKILL)
    kill_all(job.agents)
    job.kill_ranks()
    job.wait()
    job.end()
    completed = min(job.losses(r)[-1][0] for r in range(2))
    # The variables of the old run come back, those of its command line among them: the same place
    # for what it writes.
    again = TrainJob(forkrun, folder, "resume", out=job.out).start(REFT_VAULT_DIR=str(vaults))
    assert again.wait() == 0, again.said
    step = resumed(again)
    assert step is not None and step >= completed - 1, again.said
    assert again.finals() == reference.finals()


@pytest.mark.timeout(120)
def test_restarts_again_and_again(forkrun: Forkrun, folder: Path) -> None:
    reference = TrainJob(forkrun, folder, "reference").start(backend="gloo")
    assert reference.wait() == 0
    job = TrainJob(forkrun, folder, "many", max_restarts=4)
    job.start("--delay", "0.02")
    try:
        for attempt, step in enumerate((4, 8, 13, 19)):
            job.until_step(step, attempt)
            job.kill_ranks(attempt % 2, attempt=attempt)
        assert job.wait() == 0, job.said
    finally:
        job.end()
    assert len(re.findall(r"resumed at step", job.said)) == 4
    assert job.finals() == reference.finals()


def gpt(
    folder: Path, script: str, name: str, backend: str, kill_at: int = 0
) -> tuple[dict[tuple[int, int], set[str]], str]:
    """Losses by (rank, step) and the final hash of an example, under torchrun."""
    log = folder / f"{name}.loss"
    ranks = 4 if script == "pipeline" else 2
    job = f"gpt-{script}-{os.getpid()}-{name}"
    env = os.environ | {
        "OMP_NUM_THREADS": "1",
        "REFT_RUN_DIR": str(folder / "run"),
        "REFT_JOB_ID": job,
        "REFT_AGENT_LINGER_SEC": "60",
    }
    arguments = [
        "--backend",
        backend,
        "--steps",
        "12",
        "--layers",
        "2",
        "--width",
        "32",
        "--context",
        "32",
        "--samples",
        "512",
    ]
    arguments += ["--loss-log", str(log)]
    program = ROOT / "python" / "examples" / "gpt" / f"train_{script}.py"
    command = torchrun(program, *arguments, ranks=ranks, options=("--standalone", "--max-restarts=2"))
    with open(folder / f"{name}.out", "wb") as out:
        process = subprocess.Popen(command, env=env, stdout=out, stderr=subprocess.STDOUT)
    end = time.monotonic() + 150
    while process.poll() is None:
        if time.monotonic() > end:
            process.terminate()
            kill_all(rank_pids(job))
            raise TimeoutError((folder / f"{name}.out").read_text()[-4000:])
        if kill_at and log.exists() and f'"step": {kill_at},' in log.read_text():
            kill_at = 0
            kill_all([pid for pid in rank_pids(job) if is_rank(pid, 1)])
        time.sleep(0.005)
    said = (folder / f"{name}.out").read_text()
    assert process.returncode == 0, said[-4000:]
    assert (backend == "gloo") or "resumed at step" in said, said[-4000:]
    losses: dict[tuple[int, int], set[str]] = {}
    for line in log.read_text().splitlines():
        row = json.loads(line)
        losses.setdefault((row["rank"], row["step"]), set()).add(row["loss"])
    return losses, re.findall(r"^final (\w+)", said, re.MULTILINE)[-1]


def is_rank(pid: int, rank: int) -> bool:
    try:
        return f"RANK={rank}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False


@pytest.mark.timeout(400)
@pytest.mark.parametrize("script", ["ddp", "fsdp2", "pipeline"])
def test_examples(folder: Path, script: str) -> None:
    """The three GPT examples, killed under torchrun, against gloo undisturbed."""
    expected, expected_final = gpt(folder, script, "gloo", "gloo")
    losses, final = gpt(folder, script, "reft", "reft", kill_at=6)
    assert losses == expected
    assert final == expected_final


DIES_AT_EXIT = """
import atexit, os, signal

def die():
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os.kill(os.getpid(), signal.SIGKILL)

atexit.register(die)  # before reft's own handler, so it runs after it
import torch, torch.distributed as dist

dist.init_process_group("reft")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(1, 8):
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    if dist.get_rank() == 0:
        print("attempt", os.environ["TORCHELASTIC_RESTART_COUNT"], "step", step, flush=True)
"""


@pytest.mark.timeout(120)
def test_ranks_that_die_on_their_way_out_resume_at_the_last_step(folder: Path) -> None:
    """The agent has heard good-bye from all, but the launcher starts them again: nothing is trained twice."""
    script = folder / "train.py"
    script.write_text(DIES_AT_EXIT)
    command = torchrun(script, ranks=2, options=("--standalone", "--max-restarts=1"))
    env = os.environ | {"REFT_RUN_DIR": str(folder), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert "resumed at step 7" in done.stderr, done.stderr
    assert re.findall(r"attempt 1 step (\d+)", done.stdout) == ["7"]
    deadline = time.monotonic() + 10
    while agent_pids(folder) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not agent_pids(folder), "the launcher is gone, so the agent has nothing to wait for"


OWN_CHECKPOINT = """
import os, signal, sys, torch, torch.distributed as dist

dist.init_process_group("reft")
attempt, path = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), sys.argv[1]
torch.manual_seed(0)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
optimizer = torch.optim.AdamW(model.parameters())
start = 0
if attempt == 1:
    saved = torch.load(path)
    optimizer.load_state_dict(saved["optimizer"])
    start = saved["step"]
for step in range(start, 33):
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    if dist.get_rank() == 0:
        print("attempt", attempt, "step", step, flush=True)
    if attempt == 0 and step == 8:
        if dist.get_rank() == 0:  # as if a later run had saved it
            state = {k: dict(v, step=torch.tensor(30.0)) for k, v in optimizer.state_dict()["state"].items()}
            groups = optimizer.state_dict()["param_groups"]
            torch.save({"optimizer": {"state": state, "param_groups": groups}, "step": 30}, path)
        dist.barrier()
        os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.timeout(120)
def test_a_newer_checkpoint_of_the_script_stays(folder: Path) -> None:
    script = folder / "train.py"
    script.write_text(OWN_CHECKPOINT)
    command = torchrun(script, ranks=2, options=("--standalone", "--max-restarts=1"))
    env = os.environ | {"REFT_RUN_DIR": str(folder), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    words = [*command, str(folder / "own.pt")]
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert "the script has loaded a newer checkpoint of its own, which is kept" in done.stderr, done.stderr
    assert re.findall(r"attempt 1 step (\d+)", done.stdout) == ["30", "31", "32"]


TWO_TRAININGS = """
import sys, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

again = sys.argv[1] == "reft"  # gloo alone meets stale addresses when a group is made again under torchrun

def train(seed):
    torch.manual_seed(seed)
    if again or not dist.is_initialized():
        dist.init_process_group(sys.argv[1])
    model = DistributedDataParallel(torch.nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(5):
        optimizer.zero_grad()
        loss = model(torch.randn(4, 8)).square().mean()
        loss.backward()
        optimizer.step()
        print(dist.get_rank(), seed, step, loss.item().hex(), flush=True)
    if again:
        dist.destroy_process_group()

train(1)
train(2)
"""


@pytest.mark.timeout(120)
def test_a_second_training_in_the_same_process_gets_nothing_of_the_first(folder: Path) -> None:
    script = folder / "train.py"
    script.write_text(TWO_TRAININGS)
    command = torchrun(script, ranks=2)
    env = os.environ | {"REFT_RUN_DIR": str(folder), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    lines = []
    for backend in ("gloo", "reft"):
        done = subprocess.run([*command, backend], env=env, capture_output=True, text=True, timeout=100)
        assert done.returncode == 0, done.stderr
        assert "resum" not in done.stderr, done.stderr
        lines.append(sorted(done.stdout.splitlines()))
    assert lines[0] == lines[1] and len(lines[0]) == 20
