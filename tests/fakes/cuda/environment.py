"""The environment for a process whose CUDA devices are stand-ins (tests/fakes/cuda): real torch,
real ProcessGroupNCCL, no GPU.

With REFT_REQUIRE_CUDA=1 it is the machine's own devices instead, and nothing is added to the
environment.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
_PRELOADED = ["libcudart.so.13", "libcuda.so.1", "libnccl.so.2"]


@cache
def _torch() -> Path:
    """The folder of this Python's torch, which is not imported for it."""
    spec = importlib.util.find_spec("torch")
    assert spec is not None and spec.submodule_search_locations
    return Path(spec.submodule_search_locations[0])


@cache
def folder() -> Path | None:
    """Where the stand-ins for the torch of this Python were built; None if they were not.

    FAKE_CUDA_DIR names another folder.
    """
    named = os.environ.get("FAKE_CUDA_DIR")
    if named:
        return Path(named)
    for path in ROOT.glob("build*/fake-cuda/torch.txt"):
        if path.read_text().strip() == str(_torch()) and (path.parent / "operators.so").exists():
            return path.parent
    return None


def missing() -> str:
    """Why there can be no test on CUDA devices here; empty if there can be one."""
    if os.environ.get("REFT_REQUIRE_CUDA") == "1" or folder() is not None:
        return ""
    version = (_torch() / "version.py").read_text()
    if "+cu13" in version:
        raise AssertionError("torch is a build for CUDA 13, and its stand-ins are not built: tools/dev build")
    return "the stand-ins for CUDA need a build of torch for CUDA 13"


@cache
def devices_there() -> int:
    """How many the tests may use: any number of stand-ins; of a machine's own, what torch finds."""
    if os.environ.get("REFT_REQUIRE_CUDA") != "1":
        return 64
    code = "import torch; print(torch.cuda.device_count())"
    environment = os.environ | {"REFT_DISABLE": "1"}
    return int(subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, check=True).stdout)


def environment(devices: int = 2, **settings: object) -> dict[str, str]:
    """The variables to add to those of this process.

    Args:
        devices: how many there are.
        settings: see control.h, in lower case and without the prefix: `copy_mb_per_sec=100`.
    """
    if os.environ.get("REFT_REQUIRE_CUDA") == "1":
        return {}
    built = folder()
    assert built is not None, "the stand-ins are not built: see `folder`"
    path = [str(ROOT / "tests" / "fakes" / "cuda" / "autoload"), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        "LD_PRELOAD": ":".join(str(built / name) for name in _PRELOADED),
        "FAKE_CUDA_OPERATORS": str(built / "operators.so"),
        "FAKE_CUDA_DEVICES": str(devices),
        "PYTHONPATH": os.pathsep.join(path),
        "CUDA_VISIBLE_DEVICES": ",".join(map(str, range(devices))),
        "OMP_NUM_THREADS": "1",
        **{f"FAKE_CUDA_{name.upper()}": str(value) for name, value in settings.items()},
    }
