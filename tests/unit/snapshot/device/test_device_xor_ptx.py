"""ptxas assembles the kernel of snapshot/device/device_xor.cc, which is otherwise first compiled by
the driver of a job."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.one_python

SOURCE = Path(__file__).parents[4] / "snapshot/device/device_xor.cc"
TOOLKIT = "/usr/local/cuda/bin"


def ptxas() -> str | None:
    """The one of triton's wheel, which comes with torch, or of the machine."""
    triton = importlib.util.find_spec("triton")
    folders = [
        str(Path(place) / "backends/nvidia/bin")
        for place in (triton.submodule_search_locations or [] if triton else [])
    ]
    path = os.pathsep.join([*folders, os.environ.get("PATH", ""), TOOLKIT])
    return shutil.which("ptxas", path=path)


def kernel() -> str:
    found = re.findall(r'kPtx = R"\((.*?)\)";', SOURCE.read_text(encoding="utf-8"), re.DOTALL)
    assert len(found) == 1
    return found[0]


@pytest.mark.parametrize("architecture", ["sm_75", "sm_80", "sm_90", "sm_100"])
def test_the_kernel_is_assembled_for_each_generation(architecture: str, tmp_path: Path) -> None:
    assembler = ptxas()
    if assembler is None:
        pytest.skip("no ptxas: neither triton's wheel nor a CUDA toolkit is installed")
    source = tmp_path / "kernel.ptx"
    source.write_text(kernel(), encoding="utf-8")
    binary = tmp_path / "kernel.cubin"
    words = [assembler, "-arch", architecture, "--warning-as-error", "-v", "-o", binary, source]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if "is not defined for option 'gpu-name'" in done.stderr:
        pytest.skip(f"{assembler} does not know {architecture}")
    assert done.returncode == 0, done.stderr
    assert f"'reft_xor' for '{architecture}'" in done.stderr
    assert "0 bytes spill stores, 0 bytes spill loads" in done.stderr
    assert binary.stat().st_size > 0
