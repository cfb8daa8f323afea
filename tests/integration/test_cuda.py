"""CUDA tensors: real torch and real ProcessGroupNCCL, on stand-in devices where there is no GPU (tests/fakes/cuda)."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.cuda import environment as cuda
from tests.support.launchers import Forkrun, Torchrun, TrainJob, job_environment, torchrun

HERE = Path(__file__).resolve().parent


pytestmark = pytest.mark.skipif(bool(cuda.missing()), reason=cuda.missing())
on_stand_in = pytest.mark.skipif(
    os.environ.get("REFT_REQUIRE_CUDA") == "1", reason="asks the stand-in what a GPU cannot be asked"
)


@pytest.fixture(scope="module")
def forkrun() -> Iterator[Forkrun]:
    launcher = Forkrun(cuda.environment(4))
    yield launcher
    launcher.close()


def said_by(
    forkrun: Forkrun, folder: Path, *words: str, environment: dict[str, str], ranks: int = 1
) -> str:
    """What all ranks of a job of `train.py` said. It may be restarted once, and has to end well."""
    log = folder / f"said-{len(list(folder.glob('said-*')))}"
    script = [str(folder / "train.py"), *words]
    return forkrun.run(script, environment, log, ranks, 240, max_restarts=1)


def devices(count: int) -> dict[str, str]:
    """The environment of a job on so many devices."""
    if cuda.devices_there() < count:
        pytest.skip(f"needs {count} devices, and this machine has {cuda.devices_there()}")
    return cuda.environment(count)


def job_on(folder: Path, devices_there: dict[str, str], **settings: str) -> dict[str, str]:
    """The environment of a job that has these devices: Python finds what either of the two needs."""
    own = job_environment(folder, **settings)
    paths = [own["PYTHONPATH"], *filter(None, [devices_there.get("PYTHONPATH")])]
    return own | devices_there | {"PYTHONPATH": os.pathsep.join(paths)}


def ranks_of(
    forkrun: Forkrun, folder: Path, what: str, backend: str, device: str, **settings: str
) -> list[dict[str, Any]]:
    """What the two ranks of a job found; see cuda_worker.py."""
    there = devices(2) if device == "cuda" else {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    environment = job_on(folder, there) | settings
    words = [str(HERE / "cuda_worker.py"), what, backend, device, str(folder)]
    forkrun.run(words, environment, folder / f"said-{backend}", 2, 240)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


def python(code: str, **settings: object) -> subprocess.CompletedProcess[str]:
    """Runs a program on one device."""
    environment = os.environ | {"REFT_DISABLE": "1"} | cuda.environment(1, **settings)
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)


@pytest.mark.timeout(300)
def test_collectives_over_nccl(forkrun: Forkrun, folder: Path) -> None:
    for found in ranks_of(forkrun, folder, "collectives", "reft", "cuda"):
        assert [name for name, right in found.items() if not right] == []
        assert "all_reduce on the host" in found


@on_stand_in
@pytest.mark.timeout(300)
def test_ddp_trains_as_on_the_cpu(forkrun: Forkrun, folder: Path) -> None:
    """The stand-in computes with the CPU's kernels, and its NCCL adds in the order of the ranks: not a bit may differ."""
    on_device = ranks_of(forkrun, folder, "ddp", "reft", "cuda")
    assert on_device == ranks_of(forkrun, folder, "ddp", "gloo", "cpu")


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("model", "ranks", "optimizer", "policy", "signals"),
    [
        ("ddp", 1, "fused", "gap", False),
        ("ddp", 2, "adamw", "eager", False),
        ("ddp", 2, "sgd", "gap", True),
        ("fsdp", 2, "adamw", "gap", False),
        ("pipe", 4, "sgd", "gap", False),
        ("split", 2, "adamw", "gap", False),
    ],
)
def test_a_killed_rank_resumes_bit_for_bit(
    forkrun: Forkrun,
    folder: Path,
    model: str,
    ranks: int,
    optimizer: str,
    policy: str,
    signals: bool,
) -> None:
    """`signals`: the launcher is so late that the other rank's watchdog has told all ranks of the failure, in torchrun's store."""
    environment = devices(2 * ranks if model == "split" else ranks) | {"REFT_SNAPSHOT_POLICY": policy}
    arguments = ["--steps", "16", "--model", model, "--optimizer", optimizer]
    script = "cuda_train_worker.py"
    launcher = Torchrun() if signals else forkrun
    reference = TrainJob(forkrun, folder, "reference", ranks, script=script).start(
        *arguments, backend="nccl", **environment
    )
    assert reference.wait(250) == 0, reference.said[-4000:]
    job = TrainJob(launcher, folder, "resume", ranks, max_restarts=2, script=script)
    try:
        # torchrun imports torch anew, and that may take longer than the agent of other tests waits.
        job.start(*arguments, "--delay", "0.1", REFT_AGENT_LINGER_SEC="100", **environment)
        job.until_step(5, deadline_sec=200)
        if signals:
            os.kill(job.launcher.pid, signal.SIGSTOP)
        job.kill_ranks(ranks - 1)
        if signals:
            job.until_said("to signal dumping", deadline_sec=200)
            os.kill(job.launcher.pid, signal.SIGCONT)
        assert job.wait(250) == 0, job.said[-4000:]
        assert "dump signal from another rank" not in job.said
        assert job.lines("resumed at step"), job.said[-4000:]
        assert not job.lines("NOT protected") and not job.lines("not taken"), job.said
        assert bool(job.lines("not measured for a rank with state on several devices")) == (model == "split"), (
            job.said
        )
        assert job.finals() == reference.finals()
        # One step is run again to get to the place, with what it then replaces.
        again = dict(job.losses(0, attempt=1)[1:])
        assert len(again) > 2 and again.items() <= dict(reference.losses(0)).items()
    finally:
        job.end()


@on_stand_in
@pytest.mark.timeout(300)
@pytest.mark.parametrize("what", ["graph", "graph_aside"])
def test_a_captured_step_is_captured_and_its_replays_are_protected(
    forkrun: Forkrun, folder: Path, what: str
) -> None:
    for found in ranks_of(forkrun, folder, what, "reft", "cuda", FAKE_CUDA_KERNEL_US="200"):
        assert found == {"wrong": [], "verified": 12, "errors": 0, "skipped": 0}


# Begins each of the scripts below: `train.py run|kill LAST`.
ON_ONE_DEVICE = """
import os, sys, torch, torch.distributed as dist

torch.set_num_threads(1)
device = torch.device("cuda", 0)
torch.cuda.set_device(device)
dist.init_process_group("reft")
import reft

def end_of(step):
    if step == int(sys.argv[2]) and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and sys.argv[1] == "kill":
        torch.cuda.synchronize()
        reft.snapshot_now()
        os.kill(os.getpid(), 9)
"""

KEEPS = """
import ctypes
control = ctypes.CDLL("libcuda.so.1")
torch.manual_seed(0)
model = torch.nn.Linear(64, 64).to(device)
optimizer = torch.optim.AdamW(model.parameters(), fused=True)  # its counter of steps lies on the device
total = torch.zeros((), device=device)
mask = (torch.arange(2048, device=device).float().view(32, 64) / 2048).t()  # not contiguous
rows = iter(range(12))
for step in rows:
    if step == 6:
        torch.cuda.synchronize()
        reft.snapshot_now()
        control.fake_cuda_hold(1)  # the device does nothing from here on
    loss = (model(mask.t()) ** 2).mean()
    loss.backward()
    total += loss.detach()
    optimizer.step()
    optimizer.zero_grad()
    if step == 6:
        control.fake_cuda_hold(0)
    end_of(step)
print("final", total.item().hex(), loss.item().hex(), mask.sum().item(), flush=True)
dist.destroy_process_group()
"""


SIDE = """
class Prefetcher:
    def __init__(self):
        self.stream = torch.cuda.Stream()
        self.fetch(0)
    def fetch(self, step):
        with torch.cuda.stream(self.stream):
            self.batch = torch.full((32, 64), step / 16).to(device, non_blocking=True)
            for _ in range(40):
                self.batch = self.batch * 1.01
    def take(self, step):
        torch.cuda.current_stream().wait_stream(self.stream)
        batch = self.batch
        batch.record_stream(torch.cuda.current_stream())
        self.fetch(step + 1)
        return batch

torch.manual_seed(0)
model = torch.nn.Linear(64, 64).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
side = torch.cuda.Stream()
total = torch.zeros((), device=device)
sums = torch.zeros(32, 64, device=device).t()  # not contiguous
data = Prefetcher()
for step in range(12):
    loss = (model(data.take(step)) ** 2).mean()
    loss.backward()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        value = loss.detach()
        for _ in range(40):
            value = value * 1.01
        total += value
        sums += value
    optimizer.step()
    optimizer.zero_grad()
    end_of(step)
torch.cuda.synchronize()
print("final", total.item().hex(), sums.sum().item().hex(), loss.item().hex(), model.weight.sum().item().hex(), flush=True)
dist.destroy_process_group()
"""


BUFFERS = """
torch.manual_seed(0)
model = torch.nn.Linear(64, 64).to(device)
model.register_buffer("mean", torch.zeros(64, device=device))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
side = torch.cuda.Stream()
def train():
    output = model(torch.randn(8, 64).to(device))
    (output - 1).square().mean().backward()
    torch.cuda.current_stream().wait_stream(side)  # for the step before
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        value = output.detach().mean(0)
        output.record_stream(side)
        for _ in range(40):
            value = value * 1.01
        model.mean.mul_(0.9).add_(value)
for step in range(12):
    train()
    optimizer.step()
    optimizer.zero_grad()
    end_of(step)
torch.cuda.synchronize()
print("final", model.mean.sum().item().hex(), model.weight.sum().item().hex(), flush=True)
dist.destroy_process_group()
"""


MANY = """
torch.manual_seed(0)
model = torch.nn.Linear(64, 64).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
kinds = [torch.float32, torch.bool, torch.float64, torch.complex64, torch.bfloat16, torch.int64]
kept = [torch.zeros(size, dtype=kind, device=device) for kind in kinds for size in [()] * 60 + [(3,), (2, 2), (0,), (40, 80)]]
kept += [torch.zeros(6, 4, device=device).t(), torch.zeros(8, device=device)[::2]]
losses = []
for step in range(12):
    loss = (model(torch.randn(8, 64).to(device)) - 1).square().mean()
    loss.backward()
    losses.append(loss.detach())
    for index, one in enumerate(kept):
        one.fill_((step + index) % 7)
    optimizer.step()
    optimizer.zero_grad()
    end_of(step)
torch.cuda.synchronize()
sums = [one.cpu().to(torch.complex128).sum().item() for one in kept]
print("final", sum(loss.item() for loss in losses).hex(), sums, model.weight.sum().item().hex(), flush=True)
dist.destroy_process_group()
"""


STREAMS = """
torch.manual_seed(0)
models = [torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(count)]).to(device) for count in (8, 1)]
optimizers = [torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9) for model in models]
streams = [torch.cuda.Stream(), torch.cuda.Stream()]
torch.cuda.synchronize()
for step in range(12):
    batch = torch.randn(8, 64)
    for model, optimizer, stream in zip(models, optimizers, streams):
        with torch.cuda.stream(stream):
            (model(batch.to(device)) - 1).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    end_of(step)
torch.cuda.synchronize()
print("final", *[sum(p.double().sum().item() for p in model.parameters()).hex() for model in models], flush=True)
dist.destroy_process_group()
"""


# Microseconds a kernel: some fifty of them, which a stream still has before it at the first program
# point, outlast the planning that comes before the first copy.
LONGER_THAN_PLANNING = 6_000


@on_stand_in
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("script", "last", "kernel_us"),
    [
        (KEEPS, 10, 200),
        (SIDE, 8, 200),
        (BUFFERS, 8, 200),
        (MANY, 8, 200),
        (STREAMS, 8, 200),
        (STREAMS, 1, LONGER_THAN_PLANNING),
    ],
    ids=["held", "side", "buffers", "many", "streams", "first"],
)
def test_what_the_device_writes_is_put_back(
    forkrun: Forkrun, folder: Path, script: str, last: int, kernel_us: int) -> None:
    """A loss that is kept, a running sum, an optimizer's counter: captured while the device is held, and put back bit for bit; and so
    is what other streams write: a batch that is fetched ahead, a sum of metrics, a model beside another one; and hundreds of small tensors."""
    (folder / "train.py").write_text(ON_ONE_DEVICE + script)
    finals = []
    for what in ("run", "kill"):
        environment = job_on(folder, devices(1), REFT_AGENT_LINGER_SEC="100", REFT_JOB_ID=what)
        environment["FAKE_CUDA_KERNEL_US"] = str(kernel_us)
        said = said_by(forkrun, folder, what, str(last), environment=environment)
        finals += [line for line in said.splitlines() if line.startswith("final")]
    assert "resumed at step" in said, said[-4000:]
    assert "not restorable" not in said and "not restored" not in said, said[-4000:]
    assert len(finals) == 2 and finals[0] == finals[1]


@on_stand_in
@pytest.mark.timeout(300)
def test_the_first_snapshot_knows_no_stream_and_waits_for_the_devices(
    forkrun: Forkrun, folder: Path
) -> None:
    """Where nobody looks for the script's streams (REFT_RESUME=state), one on which another optimizer steps is known from then on."""
    at_end = """
def end_of(step):
    restarted = os.environ["TORCHELASTIC_RESTART_COUNT"] != "0"
    if step != (0 if restarted else 1):  # the closing optimizer is known in the second iteration
        return
    torch.cuda.synchronize()
    sealed = reft.snapshot_now()
    print("restarted" if restarted else f"sealed {sealed} of {reft.status()['steps']}", flush=True)
    print("state", *[sum(p.double().sum().item() for p in model.parameters()).hex() for model in models], flush=True)
    os._exit(0) if restarted else os.kill(os.getpid(), 9)
"""
    (folder / "train.py").write_text(ON_ONE_DEVICE + at_end + STREAMS)
    environment = job_on(folder, devices(1), REFT_AGENT_LINGER_SEC="100", REFT_RESUME="state")
    environment["FAKE_CUDA_KERNEL_US"] = str(LONGER_THAN_PLANNING)
    said = said_by(forkrun, folder, environment=environment)
    assert "resumed at step 1" in said, said[-4000:]
    before, after = [line for line in said.splitlines() if line.startswith("state")]
    assert before == after and "sealed 1 of 1" in said


@on_stand_in
@pytest.mark.timeout(120)
def test_a_captured_step_of_an_optimizer_that_counts_on_the_device_is_not_broken(folder: Path) -> None:
    code = """
import torch, torch.distributed as dist
dist.init_process_group("reft", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
import reft
model = torch.nn.Linear(16, 16).cuda()
optimizer = torch.optim.AdamW(model.parameters(), capturable=True)
x = torch.ones(4, 16, device="cuda")
def step():
    optimizer.zero_grad(set_to_none=True)
    model(x).square().mean().backward()
    optimizer.step()
side = torch.cuda.Stream()
with torch.cuda.stream(side):
    for _ in range(3): step()
torch.cuda.synchronize()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    step()
graph.replay(); reft.step(); reft.snapshot_now()
status = reft.status()
print("errors", status["errors"], "skipped", status["skipped"], "sealed", status["sealed"])
"""
    environment = job_on(folder, cuda.environment(1))
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0 and "errors 0 skipped 1 sealed 4" in done.stdout, (done.stdout + done.stderr)[-4000:]


PARTED = """
import os, signal, sys, torch, torch.distributed as dist
from torch import nn

torch.set_num_threads(1)
device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
torch.cuda.set_device(device)
dist.init_process_group("reft")
torch.manual_seed(0)
model = nn.parallel.DistributedDataParallel(nn.Linear(256, 256).to(device), device_ids=[device.index])
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for step in range(1, 13):
    model(torch.ones(2, 256, device=device)).sum().backward()
    if dist.get_rank() == 1 and step >= 5 and PARTING:
        model.module.weight.grad.mul_(1.5)  # a kernel of the user's that is wrong on one device
    optimizer.step()
    optimizer.zero_grad()
    torch.cuda.synchronize()
    dist.barrier()
    if step == 10 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os.kill(os.getpid(), signal.SIGKILL)
dist.destroy_process_group()
"""


@on_stand_in
@pytest.mark.timeout(300)
@pytest.mark.parametrize("parting", [True, False])
def test_replicas_that_went_their_own_ways_are_not_mixed(
    forkrun: Forkrun, folder: Path, parting: bool
) -> None:
    """Each saves another shard, so a resume would give every rank halves of both. The step at which
    they part is not committed, and each saves all of its own from then on."""
    (folder / "train.py").write_text(PARTED.replace("PARTING", str(parting)))
    environment = job_on(folder, devices(2), REFT_AGENT_LINGER_SEC="100")
    said = said_by(forkrun, folder, environment=environment, ranks=2)
    assert re.search(r"resumed at step (9|10): state and place in the loop", said), said[-4000:]
    parted = "step 5 was not committed: 1 replicated tensor not equal on ranks 0 1"
    assert (parted in said) == parting, said[-4000:]


PIPELINE = """
import os, torch, torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

torch.set_num_threads(1)
device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
torch.cuda.set_device(device)
dist.init_process_group("reft")
rank, world = dist.get_rank(), dist.get_world_size()
model = nn.Linear(256, 256).to(device)
x = torch.randn(8, 256).to(device)
schedule = Schedule1F1B(PipelineStage(model, rank, world, device), 4, loss_fn=nn.functional.mse_loss)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for step in range(70):
    schedule.step(target=x) if rank else schedule.step(x)
    optimizer.step()
    optimizer.zero_grad()
torch.cuda.synchronize()
dist.barrier()
os.kill(os.getpid(), 9)  # a job that ends in good order leaves nothing
"""


@on_stand_in
@pytest.mark.timeout(300)
@pytest.mark.parametrize("policy", ["gap", "eager"])
def test_a_report_is_told_by_the_devices_clock(folder: Path, policy: str) -> None:
    """The host runs ahead of its device and waits for nothing: gaps, the copies in them and what snapshots cost are the device's."""
    (folder / "train.py").write_text(PIPELINE)
    environment = job_on(folder, cuda.environment(2, kernel_us=500, copy_mb_per_sec=50))
    environment |= {
        "REFT_VAULT_DIR": str(folder / "vaults"),
        "REFT_SNAPSHOT_POLICY": policy,
        "REFT_SNAPSHOT_CHUNK_BYTES": "64K",
    }
    done = subprocess.run(
        torchrun(folder / "train.py", ranks=2), env=environment, capture_output=True, text=True, timeout=200
    )
    assert "SIGKILL" in done.stderr, (done.stdout + done.stderr)[-4000:]
    assert "of the mean step" in done.stderr, "what snapshots cost was said"
    command = [sys.executable, "-m", "reft._cli.main", "report", "--vault-dir", str(folder / "vaults"), "--steps", "40"]
    told = subprocess.run([*command, "--json"], env=job_environment(folder), capture_output=True, text=True, timeout=60)
    ranks = json.loads(told.stdout)["ranks"]
    assert [rank["rank"] for rank in ranks] == [0, 1], told.stdout + told.stderr
    for rank in ranks:
        assert len(rank["steps"]) == 40 and rank["summary"]["overhead_noise_ppm"] >= 0
        for step, following in zip(rank["steps"], rank["steps"][1:], strict=False):
            assert step["gap_ns"] > 0, "each stage waits for the other one"
            assert sum(step["copied_bytes"].values()) == 256 * 257 * 4
            assert abs(following["begin_ns"] - step["end_ns"]) < (step["end_ns"] - step["begin_ns"]) / 2
    in_gaps = sum(step["copied_bytes"]["gap"] for rank in ranks for step in rank["steps"])
    assert in_gaps > 0
    text = subprocess.run(command, env=job_environment(folder), capture_output=True, text=True, timeout=60)
    assert "copied while the device waited for others anyway" in text.stdout


@on_stand_in
def test_the_host_cannot_touch_device_memory() -> None:
    done = python("import ctypes, torch; ctypes.c_int.from_address(torch.zeros(4, device='cuda').data_ptr()).value")
    assert done.returncode == -11, done.stderr


@on_stand_in
def test_what_is_not_ordered_races() -> None:
    """A copy to pinned memory reads when its turn comes, not when it is asked for: so a missing wait shows."""
    code = """
import torch
source = torch.ones(1 << 16).pin_memory(); there = torch.empty(1 << 16, device="cuda"); torch.cuda.synchronize()
control = __import__("ctypes").CDLL("libcuda.so.1"); control.fake_cuda_hold(1)
there.copy_(source, non_blocking=True)
source.fill_(7)
control.fake_cuda_hold(0); torch.cuda.synchronize()
print(there[0].item())
"""
    done = python(code)
    assert done.stdout.split() == ["7.0"], done.stderr


@on_stand_in
def test_an_error_that_sticks_reaches_torch() -> None:
    code = """
import torch
there = torch.ones(8, device="cuda")
__import__("ctypes").CDLL("libcuda.so.1").fake_cuda_fail(b"cudaMemcpyAsync", 1, 700, 1)
for attempt in range(2):
    try: there.cpu()
    except RuntimeError as error: print(str(error).splitlines()[0])
"""
    done = python(code)
    assert done.stdout.count("an illegal memory access was encountered") == 2, done.stdout + done.stderr


@on_stand_in
def test_a_captured_graph_replays() -> None:
    code = """
import torch
there = torch.zeros(16, device="cuda"); there.add_(1); there.zero_(); torch.cuda.synchronize()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    there.add_(1)
captured = there[0].item()
graph.replay(); graph.replay()
print(captured, there[0].item())
"""
    done = python(code)
    assert done.stdout.split() == ["0.0", "2.0"], done.stderr


@on_stand_in
@pytest.mark.timeout(300)
def test_a_pipeline_copies_where_its_devices_wait(folder: Path) -> None:
    """Real 1F1B over the stand-in of NCCL: waits are marked, the schedule is learnt, and copies are ordered behind its waits."""
    command = [
        sys.executable,
        str(HERE.parent / "bench" / "placement_device.py"),
        "--jobs",
        "pipeline",
        "--blocks",
        "1",
    ]
    command += ["--steps", "3", "--settle", "7", "--json", str(folder / "found.json")]
    done = subprocess.run(command, env=job_environment(folder), capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    metrics = json.loads((folder / "found.json").read_text())["metrics"]
    assert metrics["pipeline_gap_in_gap"]["value"] > 0, metrics
