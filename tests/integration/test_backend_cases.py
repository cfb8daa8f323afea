"""The backend under torchrun, two ranks, gloo: what torch's own parallelisms do with it, and what it adds."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.launchers import Forkrun, torchrun

torch = pytest.importorskip("torch")
pytest.importorskip("reft._C")


WORKER = Path(__file__).with_name("backend_worker.py")


def run(
    case: str, tmp_path: Path, ranks: int = 2, restarts: int = 0, worker: Path = WORKER, **env: str
) -> subprocess.CompletedProcess[str]:
    merged = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "REFT_RUN_DIR": str(tmp_path / "run"),
        "REFT_AGENT_LINGER_SEC": "1",
        "REFT_SNAPSHOT": "0",
        **env,
    }
    options = [
        "--rdzv-backend=c10d",
        "--rdzv-endpoint=localhost:0",
        f"--max-restarts={restarts}",
        "--monitor-interval=0.1",
    ]
    command = torchrun(worker, case, ranks=ranks, options=options)
    return subprocess.run(command, env=merged, text=True, capture_output=True, timeout=170, check=False)


def passed(result: subprocess.CompletedProcess[str], ranks: int = 2) -> None:
    text = result.stdout + result.stderr
    if len(text) > 9000:
        text = f"{text[:6000]}\n…\n{text[-3000:]}"  # the rank that failed first speaks first
    assert result.returncode == 0, text
    for rank in range(ranks):
        assert f"ok {rank}" in result.stdout, text


@pytest.fixture(scope="module")
def forkrun() -> Iterator[Forkrun]:
    """Starts ranks as torchrun does; the other tests here use torchrun itself."""
    launcher = Forkrun()
    yield launcher
    launcher.close()


@pytest.mark.parametrize(
    "case",
    ["collectives", "average", "messages", "groups", "training", "pipeline", "errors", "futures", "again", "loader"],
)
def test_case(forkrun: Forkrun, case: str, tmp_path: Path) -> None:
    log = tmp_path / "log"
    environment = {
        "REFT_JOB_ID": case, "REFT_RUN_DIR": str(tmp_path / "run"), "REFT_AGENT_LINGER_SEC": "1",
        "REFT_SNAPSHOT": "0",
    }  # fmt: skip
    said = forkrun.run([str(WORKER), case], environment, log, 2, 170)
    assert "ok 0" in said and "ok 1" in said, said[-9000:]


def test_wrong_arguments_raise_what_gloo_raises(tmp_path: Path) -> None:
    passed(run("all", tmp_path, worker=WORKER.with_name("same_errors_worker.py")))


def test_three_ranks(tmp_path: Path) -> None:
    passed(run("collectives", tmp_path, ranks=3), ranks=3)


def test_one_rank(tmp_path: Path) -> None:
    passed(run("collectives", tmp_path, ranks=1), ranks=1)


def test_detail_wrapper_is_shut_down(tmp_path: Path) -> None:
    passed(run("detail", tmp_path, TORCH_DISTRIBUTED_DEBUG="DETAIL"))


def test_end_without_destroy_neither_hangs_nor_fails(tmp_path: Path) -> None:
    passed(run("undestroyed", tmp_path))


def test_kills_and_restarts_never_meet_a_stale_store(tmp_path: Path) -> None:
    result = run("killed", tmp_path, restarts=3)
    assert result.returncode == 0, (result.stdout + result.stderr)[-6000:]
    assert result.stdout.count("attempt 3 done") == 2


def test_disable_gives_plain_gloo(tmp_path: Path) -> None:
    passed(run("disabled", tmp_path, REFT_DISABLE="1"))
