"""`reft drill` tells whether a script resumes exactly, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.launchers import job_environment

pytest.importorskip("click")
pytest.importorskip("rich")

WORKER = Path(__file__).with_name("drill_worker.py")
LAUNCH = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]


def environment(folder: Path) -> dict[str, str]:
    names = ("REFT_RUN_DIR", "REFT_JOB_ID", "REFT_AGENT_LINGER_SEC")
    env = {key: value for key, value in job_environment(folder).items() if key not in names}
    # If an agent stays behind, it stays for long enough to be seen.
    return env | {"TMPDIR": str(folder), "OMP_NUM_THREADS": "1", "REFT_AGENT_LINGER_SEC": "60"}


def drill(folder: Path, *options: str, plant: str = "nothing") -> subprocess.CompletedProcess[str]:
    command = [*reft(*options), "--", *LAUNCH, str(WORKER), plant]
    return subprocess.run(
        command, env=environment(folder), capture_output=True, text=True, timeout=200, check=False
    )


def reft(*options: str) -> list[str]:
    return [sys.executable, "-m", "reft._cli.main", "drill", *options]


def left_behind(folder: Path) -> list[str]:
    """Files, and processes whose temporary folder this is. torch's cache of compiled code belongs
    to the user and is meant to stay."""
    found = [str(path) for path in folder.iterdir() if not path.name.startswith("torchinductor_")]
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if f"TMPDIR={folder}".encode() in path.read_bytes().split(b"\0"):
                found.append((path.parent / "cmdline").read_text().replace("\0", " "))
        except OSError:
            continue
    return found


def report(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert done.stdout.startswith("{"), done.stdout + done.stderr
    return dict(json.loads(done.stdout))


def test_a_script_that_resumes_exactly(folder: Path) -> None:
    kills = ("--kill", "0:4", "--kill", "1:6", "--kill", "0:6")
    done = drill(folder, "--json", "--steps", "9", *kills)
    found = report(done)
    assert (done.returncode, found["outcome"]) == (0, "exact"), found
    assert found["differences"] == [] and found["steps"] == 9
    died = [(kill["rank"], kill["step"]) for kill in found["kills"]]
    assert sorted(died) == [(0, 4), (0, 6), (1, 6)]
    for kill in found["kills"]:
        assert kill["step"] - 2 <= kill["resumed_at"] < kill["step"] and kill["lost"] <= 1
        assert kill["seconds"] > 0
    assert found["compared"]["last_step"] == 9 and found["compared"]["model_calls"] == 1
    assert found["cost"]["step_sec"] > found["cost"]["snapshot_sec"] > 0
    assert found["lost_node"]["protection"] == "none"
    assert left_behind(folder) == []


def test_a_planted_difference_is_named(folder: Path) -> None:
    done = drill(folder, "--kill", "1:4", "--steps", "6", plant="hash")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "NOT EXACT" in done.stdout
    lines = [line for line in done.stdout.splitlines() if line.startswith("  variable")]
    assert "main:seen (_hashlib.HASH), at the resume, ranks 0 1" in lines[0]
    # Step 3 may not be committed yet when its rank dies in step 4.
    assert re.search(r"input of DistributedDataParallel, step [34]", done.stdout), done.stdout
    words = " ".join(done.stdout.split())
    assert re.search(r"tensors, from step [34] on; most in the end \S+", words), done.stdout
    assert "max |Δ| " in words, done.stdout
    assert all(len(line) <= 80 for line in done.stdout.splitlines()[1:])
    assert left_behind(folder) == []


def test_a_script_that_is_not_deterministic_is_not_called_exact(folder: Path) -> None:
    done = drill(
        folder,
        "--kill",
        "0:3",
        "--steps",
        "5",
        plant="noise",
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "NOT DETERMINISTIC" in done.stdout and "EXACT:" not in done.stdout
    assert "once more" not in done.stdout, "the steps before the kill have shown it"
    assert left_behind(folder) == []


@pytest.mark.parametrize(
    ("plant", "why"),
    [
        ("changed", "not resumed, the script has changed: m0.module.0.weight was Float [8, 8]"),
        ("crash", "the output folder exists"),
    ],
)
def test_a_job_that_does_not_survive_is_not_resumed(folder: Path, plant: str, why: str) -> None:
    done = drill(folder, "--kill", "0:3", "--steps", "4", plant=plant)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "NOT RESUMED: " in done.stdout
    assert re.search(why.replace("[", r"\["), done.stdout.replace("\n  ", " ")), done.stdout
    assert left_behind(folder) == []


def test_a_script_with_too_few_steps_cannot_be_drilled(folder: Path) -> None:
    done = drill(folder, plant="short")
    assert done.returncode == 2, done.stdout + done.stderr
    assert "the script has taken 2 optimizer steps only" in done.stderr
    assert left_behind(folder) == []


def test_a_time_out_ends_everything(folder: Path) -> None:
    done = drill(folder, "--timeout", "8", plant="gloo")
    assert done.returncode == 2, done.stdout + done.stderr
    assert "has not ended after 8 s (--timeout)" in done.stderr
    assert 'no rank has used backend="reft"' in done.stderr
    assert left_behind(folder) == []


@pytest.mark.parametrize(
    ("command", "why"),
    [
        (["python", "train.py"], "`python train.py` does not start torchrun"),
        (["torchrun", "missing.py"], "script not found: missing.py"),
    ],
)
def test_a_command_that_it_does_not_know_gets_one_line(
    folder: Path, command: list[str], why: str
) -> None:
    env = environment(folder)
    env["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), env["PATH"]])
    done = subprocess.run(
        [*reft(), "--", *command], env=env, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("reft: ") and why in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert left_behind(folder) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_leaves_nothing_behind(folder: Path, number: signal.Signals) -> None:
    command = [*reft("--steps", "100000"), "--", *LAUNCH, str(WORKER), "nothing"]
    process = subprocess.Popen(
        command, env=environment(folder), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        until = time.monotonic() + 90
        while not any(
            '"step"' in p.read_text() for p in folder.glob("reft-drill-*/a/rank-1.jsonl")
        ):
            assert process.poll() is None and time.monotonic() < until
            time.sleep(0.05)
        process.send_signal(number)
        _, said = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == 128 + number, said
    assert left_behind(folder) == []
