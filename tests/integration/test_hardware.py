"""Hardware counters: what reft-health prints, and what becomes of it in verdicts and metrics. The GPUs
are those of a stand-in for NVML (tests/fakes/nvml).
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("reft._C", reason="needs the native module")

from reft import _C
from tests.support.launchers import Torchrun, TrainJob, free_port

ROOT = Path(__file__).resolve().parents[2]
AGENT = Path(os.environ.get("REFT_AGENT_PATH") or Path(_C.__file__).parent / "bin" / "reft-agent")
PROGRAM = AGENT.with_name("reft-health")
NVML = next(iter(sorted(ROOT.glob("build*/fake-nvml/libnvidia-ml.so.1"))), None)

pytestmark = [
    pytest.mark.skipif(not os.access(PROGRAM, os.X_OK), reason="needs reft-health"),
    pytest.mark.skipif(NVML is None, reason="needs the stand-in for NVML: a build with tests"),
]


def wait_for(condition: Callable[[], Any], seconds: float = 60) -> Any:
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.02)
    return value


class Node:
    """A machine with two GPUs, of which a test writes what NVML says."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.script = folder / "nvml"
        self.kernel_log = folder / "kmsg"
        self.kernel_log.touch()
        (folder / "sys").mkdir()
        assert NVML is not None
        self.environment = {"LD_LIBRARY_PATH": str(NVML.parent), "FAKE_NVML": str(self.script)}
        self.say()

    def say(self, *lines: str, gpus: int = 2) -> None:
        written = self.folder / "nvml.new"  # in one go: it is read at any time
        written.write_text("".join(f"{line}\n" for line in (f"gpus {gpus}", *lines)))
        written.rename(self.script)

    def add_nic(self, name: str, **counters: int) -> None:
        statistics = self.folder / "sys/class/net" / name / "statistics"
        statistics.mkdir(parents=True)
        (statistics.parent / "operstate").write_text("up\n")
        for counter, value in counters.items():
            (statistics / counter).write_text(f"{value}\n")

    @contextlib.contextmanager
    def program(self, *arguments: str) -> Iterator[subprocess.Popen[str]]:
        """reft-health on this machine."""
        words = [str(PROGRAM), "--test-sys", str(self.folder / "sys"), *arguments]
        words += ["--test-kernel-log", str(self.kernel_log)]
        process = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ | self.environment
        )
        try:
            yield process
        finally:
            process.kill()
            process.wait()


def sample(process: subprocess.Popen[str]) -> dict[str, Any]:
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write("\n")
    process.stdin.flush()
    return dict(json.loads(process.stdout.readline()))


@pytest.fixture
def node(folder: Path) -> Node:
    return Node(folder)


# ---- the program


def test_the_program_prints_what_devices_count(node: Node) -> None:
    node.say("set 1 ecc_volatile_uncorrected 2", "set 0 nvlinks_active 3", "set 0 nvlink_recoveries 6")
    node.add_nic("eth0", rx_errors=5)
    with node.program() as process:
        got = sample(process)
        assert got["nvml"] == "ok" and got["kernel_log"] is True
        first, second = got["gpus"]
        assert second["uuid"].startswith("GPU-ab12cd31-") and second["pci"] == "00000000:3B:00.0"
        assert second["counters"]["ecc_volatile_uncorrected"] == 2
        assert second["counters"]["throttle_reasons"] == 0  # by the older of two functions
        assert "nvlinks_active" not in second["counters"] and "retired_pages" not in second["counters"]
        assert first["counters"]["nvlinks_active"] == 3 and first["counters"]["nvlink_recoveries"] == 6
        assert got["network"] == [
            {"device": "eth0", "infiniband": False, "state": "up", "counters": {"rx_errors": 5}}
        ]
        assert got["xids"] == []
        assert Path(f"/proc/{process.pid}/stat").read_text().rsplit(")", 1)[1].split()[16] == "10"  # nice
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(60) == 0


def test_each_xid_is_printed_once_and_has_both_sources(node: Node) -> None:
    with node.program() as process:
        assert sample(process)["xids"] == []
        node.say("xid 1 31", "xid 1 31", "xid 0 999")  # 999: NVML does not know which
        with node.kernel_log.open("a") as log:
            log.write("4,1,2,-;NVRM: Xid (PCI:0000:3b:00): 31, pid=4711, name=python\n")
            log.write("12,1,2,-;NVRM: Xid (PCI:0000:3b:00): 79, a process wrote this\n")
        assert sample(process)["xids"] == [
            {"number": 31, "pci": "0000:3b:00", "pid": 4711, "nvml": 2, "kernel_log": 1}
        ]
        assert sample(process)["xids"] == []


def test_a_lost_gpu_is_gone_and_nothing_more_is_asked_of_it(node: Node) -> None:
    with node.program() as process:
        sample(process)
        node.say("lost 1", "block nvmlDeviceGetUUID")
        first, second = sample(process)["gpus"]
        assert not first["gone"] and first["counters"]
        assert second["gone"] and second["counters"] == {} and second["uuid"].startswith("GPU-")


def test_a_gpu_that_was_lost_before_has_no_name(node: Node) -> None:
    node.say("lost 1")
    with node.program() as process:
        first, second = sample(process)["gpus"]
        assert second == {
            "index": 1, "uuid": "", "pci": "", "gone": True, "needs_reset": False, "counters": {}
        }  # fmt: skip
        assert first["uuid"]


def test_a_machine_without_a_driver_has_no_gpus(node: Node) -> None:
    node.say(gpus=0)
    with node.program() as process:
        got = sample(process)
        assert got["nvml"] == "absent" and got["gpus"] == []


@pytest.mark.parametrize("call", ["nvmlInit_v2", "nvmlDeviceGetPowerUsage", "nvmlEventSetWait_v2"])
def test_a_call_that_never_returns_costs_only_what_it_would_have_said(node: Node, call: str) -> None:
    node.say(f"block {call}")
    node.add_nic("eth0", rx_errors=5)
    with node.program("--test-nvml-ms", "300") as process:
        for _ in range(2):
            got = wait_for(lambda: (one := sample(process))["nvml"] != "starting" and one)
            assert got["nvml"] == "silent", got
            assert got["nvml_text"].startswith(call), got
            assert ("of GPU 0" in got["nvml_text"]) == ("Device" in call)
            assert got["gpus"] == [] and got["network"][0]["counters"] == {"rx_errors": 5}
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(60) == 0


def test_the_program_needs_no_library_of_nvidia() -> None:
    listed = subprocess.run(["readelf", "-d", PROGRAM], capture_output=True, text=True, check=True).stdout
    needed = re.findall(r"\(NEEDED\).*\[(.*)\]", listed)
    assert needed and not any("nvidia" in name or "cuda" in name for name in needed), needed
    assert "nvmlInit" not in AGENT.read_bytes().decode("latin-1")  # the agent calls none of NVML


# ---- the agent


class Job:
    """A job of two ranks on such a machine, whose last one fails or stops when it is told to."""

    def __init__(self, node: Node, then: str, **env: str) -> None:
        self.node, self.go, self.port = node, node.folder / "go", free_port()
        self.job = TrainJob(Torchrun(), node.folder, f"hw-{then}", script="hardware_worker.py")
        settings = node.environment | {"REFT_METRICS_PORT": str(self.port)} | env
        self.job.start("--go", str(self.go), "--then", then, **settings)

    def metrics(self) -> str:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=20) as page:
                return str(page.read().decode())
        except OSError:
            return ""

    def until_sampled(self) -> Job:
        wait_for(lambda: "reft_agent_nvml_answers" in self.metrics(), 120)
        return self

    def report(self) -> dict[str, Any]:
        """The first verdict that is written whole."""

        def written() -> dict[str, Any] | None:
            for path in sorted(self.job.run.glob("*/node-0/verdicts/*.json")):
                with contextlib.suppress(ValueError):
                    return dict(json.loads(path.read_text()))
            return None

        return dict(wait_for(written, 120))


@contextlib.contextmanager
def running(node: Node, then: str, **env: str) -> Iterator[Job]:
    job = Job(node, then, **env)
    try:
        yield job
    finally:
        job.job.end()


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("lines", "note"),
    [
        (["lost 1", "xid 1 79"], "GPU 1 (GPU-ab12cd31) fell off the bus (Xid 79)"),
        (["xid 0 95"], "GPU 0 (GPU-ab12cd30): Xid 95 since the job began, an error of the hardware"),
    ],
)
def test_a_crash_after_a_fault_of_a_gpu_excludes_the_node(node: Node, lines: list[str], note: str) -> None:
    with running(node, "raise") as job:
        job.until_sampled()
        node.say(*lines)
        job.go.touch()
        assert job.job.wait(120) != 0
        report = job.report()
        assert report["state"] == "crash" and report["remedy"] == "exclude node", report["text"]
        assert [culprit["rank"] for culprit in report["culprits"]] == [1]
        assert report["hardware"] == [{"node": 0, "fatal": True, "text": note}]
        assert note in report["evidence"]
        assert "class: exclude node" in job.job.log.read_text()


@pytest.mark.timeout(240)
@pytest.mark.parametrize("lines", [[], ["xid 1 31"], ["set 1 throttle_reasons 4", "set 0 pcie_replays 3"]])
def test_a_crash_with_healthy_hardware_is_decided_as_ever(node: Node, lines: list[str]) -> None:
    with running(node, "raise") as job:
        job.until_sampled()
        node.say(*lines)
        job.go.touch()
        assert job.job.wait(120) != 0
        report = job.report()
        assert report["remedy"] == "retry", report["text"]
        texts = [note["text"] for note in report["hardware"]]
        program = "GPU 1 (GPU-ab12cd31): Xid 31 since the job began, mostly an error of the program"
        assert texts == ([program] if lines == ["xid 1 31"] else [])


@pytest.mark.timeout(240)
def test_a_driver_that_does_not_answer_delays_no_verdict(node: Node) -> None:
    with running(node, "raise", REFT_AGENT_LINGER_SEC="60") as job:
        job.until_sampled()
        node.say("block nvmlDeviceGetTemperature")
        job.go.touch()
        assert job.job.wait(120) != 0
        assert job.report()["remedy"] == "retry"
        # It says so once it is sure, and goes on.
        wait_for(lambda: "reft_agent_nvml_answers" in (page := job.metrics()) and "} 0" in page.split("nvml_answers{")[-1])


@pytest.mark.timeout(240)
def test_a_hang_report_has_the_notes_and_metrics_have_the_counters(node: Node) -> None:
    with running(node, "stop", REFT_HANG_SUSPECT_SEC="2") as job:
        assert job.until_sampled()
        node.say("set 1 ecc_volatile_uncorrected 2", "set 1 throttle_reasons 128")
        job.go.touch()
        report = job.report()
        assert (report["state"], report["class"]) == ("hang", "stopped"), report["text"]
        assert [culprit["rank"] for culprit in report["culprits"]] == [1]
        assert report["remedy"] == "none"
        notes = [
            "GPU 1 (GPU-ab12cd31): 2 uncorrectable ECC errors since the job began",
            "GPU 1 (GPU-ab12cd31) is throttled: power brake",
        ]
        assert [note["text"] for note in report["hardware"]] == notes
        assert report["evidence"][-2:] == notes
        assert "- GPU 1 (GPU-ab12cd31): 2 uncorrectable ECC" in report["screen"]
        page = wait_for(lambda: "uncorrected" in (text := job.metrics()) and text)
        (line,) = [line for line in page.splitlines() if "ecc_volatile_uncorrected_total{" in line and "cd31" in line]
        assert line.endswith("} 2") and line.startswith("reft_agent_gpu_")


@pytest.mark.timeout(240)
def test_nothing_is_started_if_it_is_not_wanted(node: Node) -> None:
    with running(node, "raise", REFT_HARDWARE_COUNTERS="0") as job:
        wait_for(lambda: "reft_agent_connections" in job.metrics(), 120)
        node.say("lost 1")
        job.go.touch()
        assert job.job.wait(120) != 0
        assert "reft_agent_gpu" not in job.metrics()
        assert job.report()["hardware"] == []
