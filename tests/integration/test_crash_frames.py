"""A fault of native code: the verdict and torchrun's error file name the function that failed."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("reft._C", reason="needs the native module")

from tests.support.launchers import Torchrun, TrainJob

CODE = """
#include <stdlib.h>
__attribute__((noinline)) int write_past_the_end(int *at) { at[0] = 1; return at[0] + 1; }
int fail_in_c(int how) {
  if (how == 0) return write_past_the_end((int *)16) + 1;
  abort();
}
"""


@pytest.fixture(scope="module")
def extension(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler")
    folder = tmp_path_factory.mktemp("extension")
    (folder / "own.c").write_text(CODE)
    built = folder / "libown_extension.so"
    subprocess.run([compiler, "-O1", "-g", "-shared", "-fPIC", "-o", built, folder / "own.c"], check=True)
    return built


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("how", "signal", "function"), [(0, "SIGSEGV", "write_past_the_end"), (1, "SIGABRT", "fail_in_c")]
)
@pytest.mark.parametrize("thread", ["main", "other"])
def test_the_function_is_named(
    folder: Path, extension: Path, how: int, signal: str, function: str, thread: str
) -> None:
    job = TrainJob(Torchrun(), folder, f"frames-{how}-{thread}", script="native_fault_worker.py")
    try:
        job.start("--library", str(extension), "--how", str(how), "--thread", thread)
        assert job.wait(200) != 0
        said = job.log.read_text()
        flat = " ".join(said.split())
        assert f"was ended by {signal}" in flat, said
        assert f", in {function} (libown_extension.so+0x" in flat, said
        _, summary = flat.split(f"{signal} in native code: ")  # torchrun's
        assert f" {function} (libown_extension.so+0x" in " " + summary[:400], said
        (path,) = job.folder.glob("run/*/node-0/verdicts/*.json")
        (rank,) = [r for r in json.loads(path.read_text())["ranks"] if r.get("ending", {}).get("fault")]
        frames = [frame["function"] for frame in rank["ending"]["fault"]["frames"]]
        assert frames[:2] == ["write_past_the_end", "fail_in_c"] or "fail_in_c" in frames[:5], frames
        assert "onFault" not in frames
    finally:
        job.end()
