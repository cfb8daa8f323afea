"""Which commands a drill understands, and what it makes of them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from reft._cli.drill_launch import NotUnderstood, understand

LOGS = Path("/logs")


@pytest.fixture(autouse=True)
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()
    torchrun = Path("bin/torchrun")
    torchrun.parent.mkdir()
    torchrun.touch(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    for name in ("PET_MAX_RESTARTS", "PET_NNODES", "PET_LOG_DIR"):
        monkeypatch.delenv(name, raising=False)


def words(text: str, restarts: int = 1) -> str:
    return " ".join(understand(text.split()).argv(restarts, LOGS))


def test_restarts_and_the_place_of_logs_are_added_before_the_script() -> None:
    assert words("torchrun --nproc-per-node=2 train.py --lr 1") == (
        "torchrun --nproc-per-node=2 --max-restarts=1 --log-dir=/logs train.py --lr 1"
    )


def test_restarts_that_are_switched_off_are_switched_on() -> None:
    assert "--max-restarts=0 --max-restarts=2 " in words("torchrun --max-restarts=0 train.py", 2)


def test_enough_restarts_and_a_log_dir_stay() -> None:
    text = "torchrun --max-restarts 3 --log-dir here train.py"
    assert words(text, 2) == text


def test_arguments_of_the_script_are_not_torchrun_s() -> None:
    text = words("torchrun train.py --max-restarts 5 train.py --nnodes 4", 1)
    assert (
        text
        == "torchrun --max-restarts=1 --log-dir=/logs train.py --max-restarts 5 train.py --nnodes 4"
    )


def test_the_end_of_options_stays_their_end() -> None:
    assert words("torchrun --nproc-per-node 2 -- train.py") == (
        "torchrun --nproc-per-node 2 --max-restarts=1 --log-dir=/logs -- train.py"
    )


@pytest.mark.parametrize(
    ("text", "begins"),
    [
        (f"{sys.executable} -m torch.distributed.run train.py", f"{sys.executable} -m torch.distributed.run "),
        (f"{sys.executable} -u -m torch.distributed.run train.py", f"{sys.executable} -u -m torch.distributed.run "),
        ("reft run --nproc-per-node=2 train.py", f"{sys.executable} -m torch.distributed.run --nproc-per-node=2 "),
    ],
)  # fmt: skip
def test_other_ways_to_call_torchrun(text: str, begins: str) -> None:
    assert words(text).startswith(begins)
    assert words(text).endswith(" --max-restarts=1 --log-dir=/logs train.py")


def test_a_module_needs_no_file() -> None:
    assert words("torchrun -m package.train --lr 1").endswith("-m --max-restarts=1 --log-dir=/logs package.train --lr 1")  # fmt: skip


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("python train.py", "`python train.py` does not start torchrun"),
        ("accelerate launch train.py", "does not start torchrun"),
        ("./train.sh", "does not start torchrun"),
        ("/nowhere/torchrun train.py", "command not found: /nowhere/torchrun"),
        ("torchrun missing.py", "script not found: missing.py"),
        ("torchrun --nnodes=2 train.py", "runs on one node, and --nnodes=2 asks for more"),
        ("torchrun --nnodes=1:4 train.py", "runs on one node"),
        ("torchrun --nproc=x --no-such train.py", "torchrun does not understand its options"),
        ("torchrun", "torchrun does not understand its options"),
    ],
)
def test_what_a_drill_cannot_run_is_told_in_one_line(text: str, why: str) -> None:
    with pytest.raises(NotUnderstood) as error:
        understand(text.split())
    assert why in str(error.value) and "\n" not in str(error.value)
