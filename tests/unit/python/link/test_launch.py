"""What a process knows about its launch: which commands are the same, and which cannot be told."""

from __future__ import annotations

import argparse
import multiprocessing
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from reft._link import launch

STANDALONE = "0b1e0a2e-8d0f-4d0c-9a65-2a9c0a1f6a10"


class Opaque:
    pass


def work(rank: int, value: Any) -> None:
    pass


def spawned(monkeypatch: pytest.MonkeyPatch, target: Any, *args: Any) -> str | None:
    """The command of a process that multiprocessing has started with these arguments."""
    process = multiprocessing.get_context("spawn").Process(target=target, args=args)
    monkeypatch.setattr(multiprocessing, "current_process", lambda: process)
    monkeypatch.setattr(multiprocessing, "parent_process", lambda: process)
    return launch.launch({}).command


def test_script_arguments_and_folder_are_the_command(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # A worker of pytest-xdist has no script.
    monkeypatch.setattr(sys.modules["__main__"], "__file__", "train.py", raising=False)
    seen = []
    for arguments in (["train.py"], ["train.py", "--lr", "1"], ["train.py", "--lr 1"], ["x.py"]):
        monkeypatch.setattr(sys, "orig_argv", ["python", *arguments])
        seen.append(launch.launch({}).command)
    monkeypatch.chdir(tmp_path)
    seen.append(launch.launch({}).command)
    assert len(set(seen)) == 5 and None not in seen


def test_what_multiprocessing_runs_is_part_of_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    values: list[Any] = [0.1, 0.2, "0.1", (0.1,), [0.1], {"lr": 0.1}, Path("a"), None, True, 1]
    values += [argparse.Namespace(lr=0.1), argparse.Namespace(lr=0.2)]
    found = [spawned(monkeypatch, work, 0, value) for value in values]
    assert None not in found and len(set(found)) == len(values)
    assert spawned(monkeypatch, work, 0, 0.1) == found[0]


@pytest.mark.parametrize("value", [Opaque(), [Opaque()], lambda: 0, {1: Opaque()}])
def test_arguments_that_cannot_be_compared_are_no_command(
    monkeypatch: pytest.MonkeyPatch, value: Any
) -> None:
    captured = value
    function = (lambda: captured) if callable(value) else value
    assert spawned(monkeypatch, work, 0, function) is None


def test_endless_arguments_are_no_command(monkeypatch: pytest.MonkeyPatch) -> None:
    endless: list[Any] = []
    endless.append(endless)
    assert spawned(monkeypatch, work, 0, endless) is None
    assert spawned(monkeypatch, work, 0, list(range(100_000))) is None


def test_the_file_that_torch_hands_to_spawned_ranks_does_not_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from torch.multiprocessing.spawn import _wrap

    one = spawned(monkeypatch, _wrap, work, 0, (0.1,), "/tmp/a")
    assert one is not None and one == spawned(monkeypatch, _wrap, work, 0, (0.1,), "/tmp/b")
    assert one != spawned(monkeypatch, _wrap, work, 0, (0.2,), "/tmp/a")


def test_a_forked_process_has_no_command(monkeypatch: pytest.MonkeyPatch) -> None:
    process = multiprocessing.get_context("fork").Process(target=work, args=(0, 1))
    monkeypatch.setattr(multiprocessing, "current_process", lambda: process)
    monkeypatch.setattr(multiprocessing, "parent_process", lambda: process)
    assert launch.launch({}).command is None


def test_a_program_that_is_typed_in_has_no_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "__main__", types.ModuleType("__main__"))
    monkeypatch.setattr(sys, "orig_argv", ["python", "-m", "ipykernel_launcher", "-f", "x.json"])
    assert launch.launch({}).command is None
    monkeypatch.setattr(sys, "orig_argv", ["python", "-c", "print()"])
    assert launch.launch({}).command is not None


@pytest.mark.parametrize(
    ("env", "label"),
    [
        ({"TORCHELASTIC_RUN_ID": "100", "SLURM_JOB_ID": "7"}, "run-100"),
        ({"TORCHELASTIC_RUN_ID": "none", "SLURM_JOB_ID": "7"}, "slurm-7.0"),
        ({"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "3"}, "slurm-7.3"),
    ],
)
def test_a_place_that_has_a_name(env: dict[str, str], label: str) -> None:
    assert launch.launch(env).label == label


def test_else_a_place_is_the_session_that_the_launcher_was_started_in(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "argv", ["/x/my train.py"])
    by_hand = launch.launch({})
    assert by_hand.label == "my_train" and by_hand.place.startswith("session ")
    for run_id in (STANDALONE, "none"):
        assert launch.launch({"TORCHELASTIC_RUN_ID": run_id}).place == by_hand.place


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("wrapper", [[], ["sh", "-c", '"$@"; true', "sh"], ["timeout", "60"]])
def test_how_a_command_is_wrapped_and_whether_it_leads_a_session_does_not_count(
    wrapper: list[str], own: bool
) -> None:
    program = "from reft._link import launch; print(launch.launch({}).place)"
    found = subprocess.run(
        [*wrapper, sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        start_new_session=own and not wrapper,
    )
    assert found.stdout.strip() == launch.launch({}).place


def test_restarts() -> None:
    env = {"TORCHELASTIC_RESTART_COUNT": "3", "TORCHELASTIC_MAX_RESTARTS": "5"}
    assert (launch.attempt(env), launch.restarts_left(env)) == (3, 2)
    assert launch.attempt({"SLURM_RESTART_COUNT": "2"}) == 2
    assert launch.attempt({"TORCHELASTIC_RESTART_COUNT": "²"}) == launch.restarts_left({}) == 0


def test_the_group_of_workers_counts_under_torchrun_alone(tmp_path: Path) -> None:
    assert launch.host(tmp_path, {"GROUP_RANK": "1"}).group == ""
    assert launch.host(tmp_path, {"GROUP_RANK": "1", "TORCHELASTIC_RUN_ID": "x"}).group == "1"


def test_the_run_directory_is_made_for_its_owner_alone(tmp_path: Path) -> None:
    run_dir = tmp_path / "a" / "b"
    assert launch.host(run_dir, {}).run_dir_id == launch.identity_of(run_dir) != ""
    assert run_dir.stat().st_mode & 0o777 == run_dir.parent.stat().st_mode & 0o777 == 0o700
    assert launch.host(Path("not/absolute"), {}).run_dir_id == ""
