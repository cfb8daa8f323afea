"""`import torch` works whatever state reft is in; what is wrong is said to whoever asks for the backend, with what to do."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

# Makes `reft._C` what the test wants before torch is imported: absent, or the file BROKEN.
BREAK = """
import importlib.abc, importlib.machinery, os, sys
class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name != "reft._C":
            return None
        broken = os.environ.get("BROKEN")
        if broken is None:
            raise ModuleNotFoundError("No module named 'reft._C'", name=name)
        loader = importlib.machinery.ExtensionFileLoader(name, broken)
        return importlib.machinery.ModuleSpec(name, loader, origin=broken)
sys.meta_path.insert(0, Finder())
"""
GLOO = """
import torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
t = torch.ones(3); dist.all_reduce(t); assert t.sum() == 3
dist.destroy_process_group()
"""
REFT = """
import torch.distributed as dist
try:
    dist.init_process_group("reft", store=dist.HashStore(), rank=0, world_size=1)
except Exception as error:
    print("error:", type(error).__name__, error)
else:
    t = torch.ones(3); dist.all_reduce(t); assert t.sum() == 3
    print("group:", type(dist.group.WORLD._get_backend(torch.device("cpu"))).__name__, dist.get_backend())
    dist.destroy_process_group()
"""


def run(code: str, cwd: Path, **env: str) -> tuple[str, str]:
    """Output and errors of a program that must end with status 0."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("REFT_", "TORCH"))}
    environment |= {"REFT_RUN_DIR": str(cwd / "r"), "REFT_AGENT_LINGER_SEC": "0", "REFT_CONNECT_SEC": "5"} | env
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=cwd, env=environment, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    return done.stdout, done.stderr


@pytest.fixture
def garbage(tmp_path: Path) -> str:
    path = tmp_path / "_C.so"
    path.write_bytes(b"\x7fELF" + os.urandom(4096))
    return str(path)


@pytest.fixture
def unresolved(tmp_path: Path) -> str:
    """A library of another torch: it needs a symbol that this one does not have."""
    source = tmp_path / "c.c"
    source.write_text(
        "extern int _ZN3c104gone10in_2_99_v1Ev(void); int PyInit__C(void) { return _ZN3c104gone10in_2_99_v1Ev(); }"
    )
    path = tmp_path / "_C.so"
    compiler = os.environ.get("CC", "cc")
    try:
        subprocess.run(
            [compiler, "-shared", "-fPIC", "-Wl,-z,now", "-o", path, source], check=True, capture_output=True
        )
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no C compiler: {error}")
    return str(path)


@pytest.mark.timeout(120)
def test_name_is_known_after_import_torch(tmp_path: Path) -> None:
    out, err = run(
        "import torch, sys\nprint('reft' in torch.distributed.Backend.backend_list, 'reft._C' in sys.modules)", tmp_path
    )
    assert out.split() == ["True", "False"], out  # the name and nothing else: no native library
    assert err == ""


@pytest.mark.timeout(120)
@pytest.mark.parametrize("library", ["absent", "garbage", "unresolved"])
def test_library_is_not_usable(tmp_path: Path, library: str, request: pytest.FixtureRequest) -> None:
    env = {} if library == "absent" else {"BROKEN": str(request.getfixturevalue(library))}
    out, err = run(BREAK + "import torch\n" + GLOO + REFT, tmp_path, **env)
    assert err == ""
    assert out.startswith("error: RuntimeError"), out
    assert 'backend "reft"' in out and "REFT_DISABLE=1" in out and "Install it again" in out, out


@pytest.mark.timeout(120)
def test_library_is_not_usable_but_disabled(tmp_path: Path) -> None:
    out, err = run(BREAK + "import torch\n" + REFT, tmp_path, REFT_DISABLE="1")
    assert "ProcessGroupGloo" in out, out
    assert err == ""


@pytest.mark.timeout(120)
def test_disabled(tmp_path: Path) -> None:
    out, err = run("import torch\n" + REFT + "import sys; print('reft._C' in sys.modules)", tmp_path, REFT_DISABLE="1")
    assert "ProcessGroupGloo" in out and "False" in out.split()[-1], out
    assert err == ""
    assert not (tmp_path / "r").exists()


@pytest.mark.timeout(120)
def test_disabled_beats_malformed_settings(tmp_path: Path) -> None:
    out, err = run(
        "import torch\n" + REFT, tmp_path, REFT_DISABLE="1", REFT_SNAPSHOT="perhaps", REFT_NONSENSE="1", REFT_STRICT="1"
    )
    assert "ProcessGroupGloo" in out and err == "", out + err


@pytest.mark.timeout(120)
@pytest.mark.parametrize("version", ["2.5.1", "2.10.0+cpu"])
def test_torch_that_is_too_old(tmp_path: Path, version: str) -> None:
    out, err = run(f"import torch\ntorch.__version__ = {version!r}\n" + GLOO + REFT, tmp_path)
    assert out.startswith("error: RuntimeError") and version in out and "2.11" in out and "REFT_DISABLE=1" in out, out
    assert err == ""


@pytest.mark.timeout(120)
def test_another_build_of_the_same_torch_is_tried(tmp_path: Path) -> None:
    version = ".".join(torch.__version__.split(".")[:2]) + ".9.dev20260101"
    out, _ = run(f"import torch\ntorch.__version__ = {version!r}\n" + REFT, tmp_path)
    assert out.startswith("group: ReftBackend"), out


@pytest.mark.timeout(120)
@pytest.mark.parametrize("version", ["2.99.0", "3.0.0a0+git1234"])
def test_a_library_for_another_torch_is_refused(tmp_path: Path, version: str) -> None:
    out, _ = run(f"import torch\ntorch.__version__ = {version!r}\n" + REFT, tmp_path)
    assert out.startswith("error: RuntimeError"), out
    assert f"this is {version}. Install it again for this torch" in out, out


@pytest.mark.timeout(120)
def test_version_that_is_no_version(tmp_path: Path) -> None:
    out, _ = run("import torch\ntorch.__version__ = 'mainline'\n" + REFT, tmp_path)
    assert out.startswith(("group: ReftBackend", "error: RuntimeError")), out


@pytest.mark.timeout(120)
def test_autoload_switched_off(tmp_path: Path) -> None:
    out, err = run("import torch\n" + GLOO + REFT, tmp_path, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    # torch 2.14 has a second kind of entry point, which this switch does not stop.
    assert out.startswith(("error: ", "group: ReftBackend")), out
    out, err = run("import torch\nimport reft\n" + REFT, tmp_path, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert out.startswith("group: ReftBackend"), out + err


@pytest.mark.timeout(120)
def test_reft_before_torch(tmp_path: Path) -> None:
    out, err = run("import reft, sys\nassert 'torch' not in sys.modules\nimport torch\n" + REFT, tmp_path)
    assert out.startswith("group: ReftBackend"), out + err
    out, err = run("import reft\nimport torch\n" + REFT, tmp_path, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert out.startswith(("group: ReftBackend", "error: ")), out + err


@pytest.mark.timeout(120)
def test_data_loader_workers(tmp_path: Path) -> None:
    """Worker processes inherit or import everything, start nothing, and leave the rank's own parts alone."""
    code = """
import os, sys, torch
import torch.distributed as dist
class Data(torch.utils.data.Dataset):
    def __len__(self): return 64
    def __getitem__(self, i):
        import reft
        assert reft.status() == {} or os.getppid() != 1
        return torch.full((8,), float(i)), torch.tensor(sum(t.startswith("reft-") for t in names()))
def names():
    return [open(f"/proc/self/task/{t}/comm").read().strip() for t in os.listdir("/proc/self/task")]
def main():
    dist.init_process_group("reft", store=dist.HashStore(), rank=0, world_size=1)
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    for context in ("fork", "spawn"):
        for x, threads in torch.utils.data.DataLoader(Data(), 8, num_workers=2, multiprocessing_context=context):
            assert threads.sum() == 0, threads
            model(x).mean().backward()
            optimizer.step()
    import reft
    status = reft.status()
    assert status["captured"] == 16 and status["dropped"] == 0 and status["errors"] == 0, status
    dist.destroy_process_group()
    print("done")
if __name__ == "__main__":
    main()
"""
    script = tmp_path / "script.py"
    script.write_text(code)
    out, err = run(
        f"import runpy, sys; sys.argv = [{str(script)!r}]; runpy.run_path({str(script)!r}, run_name='__main__')",
        tmp_path,
    )
    assert "done" in out, out + err


@pytest.mark.timeout(120)
def test_torch_without_distributed(tmp_path: Path) -> None:
    code = "import torch\ntorch.distributed.is_available = lambda: False\nimport reft_autoload\nreft_autoload.register()\nprint('ok')"
    out, err = run(code, tmp_path)
    assert out == "ok\n" and err == ""
