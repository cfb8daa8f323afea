"""What `import torch` does with reft installed: nothing that can hurt, until somebody asks for the backend."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

_found = importlib.util.find_spec("reft_autoload")
assert _found is not None and _found.origin is not None
SOURCES = Path(_found.origin).parent  # the sources if the install is editable

USE = """
import tempfile
import torch.distributed as dist
with tempfile.NamedTemporaryFile() as f:
    dist.init_process_group("reft", init_method=f"file://{f.name}.s", rank=0, world_size=1)
    dist.all_reduce(torch.ones(1))
    print(type(dist.group.WORLD._get_backend(torch.device("cpu"))).__name__)
    dist.destroy_process_group()
"""


def python(code: str, *paths: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """Runs code where `paths` come first and the entry point is called by hand, as torch does at the end of its import."""
    merged = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "REFT_SNAPSHOT": "0",
        "REFT_BANNER": "0",
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
    }
    merged.update(env)
    start = "import sys; sys.meta_path[:] = [f for f in sys.meta_path if 'editable' not in type(f).__module__]\n"
    start += f"sys.path[:0] = {[str(p) for p in paths] or [str(SOURCES)]!r}\n"
    return subprocess.run(
        [sys.executable, "-c", start + code], env=merged, text=True, capture_output=True, timeout=120, check=False
    )


REGISTER = "import torch, reft_autoload; reft_autoload.register(); reft_autoload.register()\n"


def test_registering_loads_nothing_and_says_nothing() -> None:
    code = REGISTER + (
        "import threading\n"
        "assert 'REFT' in torch.distributed.Backend._plugins\n"
        "assert 'reft' not in sys.modules and 'reft._C' not in sys.modules\n"
        "assert threading.active_count() == 1\n"
    )
    result = python(code)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", ""), result.stderr


def test_reft_before_torch() -> None:
    pytest.importorskip("reft._C")
    code = "import reft\nassert 'torch' not in sys.modules\n" + REGISTER + USE
    result = python(code)
    assert result.returncode == 0 and "ReftBackend" in result.stdout, result.stderr


def test_disable_gives_torchs_own_backend() -> None:
    result = python(REGISTER + USE + "assert 'reft' not in sys.modules\n", REFT_DISABLE="1")
    assert result.returncode == 0 and "ProcessGroupGloo" in result.stdout, result.stderr


@pytest.fixture
def broken(tmp_path: Path) -> Path:
    """A package whose native library is not one."""
    package = tmp_path / "reft"
    package.mkdir()
    for name in ("__init__.py", "_torch/backend.py"):
        (package / name).parent.mkdir(exist_ok=True)
        (package / name).write_text((SOURCES / "reft" / name).read_text())
    (package / "_C.so").write_bytes(b"nonsense")
    (tmp_path / "reft_autoload.py").write_text((SOURCES / "reft_autoload.py").read_text())
    return tmp_path


def test_broken_library_is_one_clear_error_at_use(broken: Path) -> None:
    result = python(REGISTER + "print('imported')\n" + USE, broken)
    assert result.stdout == "imported\n"
    assert result.returncode != 0
    last = result.stderr.strip().splitlines()[-1]
    assert last.startswith('RuntimeError: backend "reft" cannot load its native library'), result.stderr
    assert "REFT_DISABLE=1" in last and "pip install" in last


def test_broken_library_does_not_matter_when_disabled(broken: Path) -> None:
    result = python(REGISTER + USE, broken, REFT_DISABLE="1")
    assert result.returncode == 0, result.stderr


def test_old_torch_is_named_at_use_only() -> None:
    result = python(REGISTER + "print('imported'); torch.__version__ = '2.6.0'\n" + USE)
    assert result.stdout == "imported\n"
    assert "needs torch 2.11 or newer, this is 2.6.0" in result.stderr


def test_a_changed_torch_does_not_break_the_import() -> None:
    code = "import torch, reft_autoload\ntorch.distributed.Backend.register_backend = None\nreft_autoload.register()\nprint('fine')\n"
    result = python(code)
    assert (result.stdout, result.stderr, result.returncode) == ("fine\n", "", 0)


def test_torchcomms_switch_is_warned_about_at_use() -> None:
    code = (
        "import torch\nimport torch.distributed.distributed_c10d as c\n"
        "import reft_autoload; reft_autoload.register()\n"
        "c._use_torchcomms_enabled = lambda: True\nc._torchcomms_handles_backend = lambda name: True\n"
        "c.BackendConfig('gloo'); print('quiet', file=sys.stderr)\nc.BackendConfig('reft')\n"
    )
    result = python(code, TORCH_DISTRIBUTED_USE_TORCHCOMMS="1")
    assert result.returncode == 0, result.stderr
    quiet, _, said = result.stderr.partition("quiet")
    assert "reft" not in quiet and "torchcomms in place of reft" in said
