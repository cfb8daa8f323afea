"""Runs one script three times: uninterrupted, captured and killed at a step, and restored in a fresh process."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]
PROBE = '''
import atexit, json, os, pickle, signal, sys, time
from reft import _continuation as c

mode, at, file, out = os.environ["PROBE_MODE"], int(os.environ["PROBE_AT"]), *os.environ["PROBE_FILES"].split(":")
lines, calls, result = [], 0, {}

def trace(*values):
    lines.append(json.loads(json.dumps(values)))

def save():
    with open(out, "w") as stream:
        json.dump({"lines": lines, **result}, stream)

def program_point(frame, owned=()):
    """Stands for the optimizer's step post-hook."""
    global calls
    calls += 1
    if mode == "restore" and calls == 1:
        with open(file, "rb") as stream:
            captured, rng = pickle.load(stream)
        try:
            report = c.plan(frame, captured).write()
            result["problems"] = report.problems
            c.restore_rng(rng)
        except c.FrameMismatch as error:
            result["mismatch"] = str(error)
        lines.clear()
        return
    c.observe(frame)
    if calls != at:
        return
    if mode == "plain":
        lines.clear()
    elif mode == "capture":
        begin = time.perf_counter()
        captured = c.capture(frame, int(os.environ["PROBE_LIMIT"]), owned)
        result["first_ms"] = 1e3 * (time.perf_counter() - begin)
        begin = time.perf_counter()
        for _ in range(20):  # large containers are compared at some captures only
            captured = c.capture(frame, int(os.environ["PROBE_LIMIT"]), owned)
        result["ms"] = 1e3 * (time.perf_counter() - begin) / 20
        result["bytes"] = len(captured["frames"])
        result["uncaptured"] = captured["uncaptured"]
        result["exact"] = captured["exact"]
        with open(file, "wb") as stream:
            pickle.dump((captured, c.capture_rng()), stream)
        save()
        os.kill(os.getpid(), signal.SIGKILL)

def step():
    program_point(sys._getframe(1))

def hook_optimizers():
    import torch
    c.install()
    def post_hook(optimizer, args, kwargs):
        owned = {id(p) for g in optimizer.param_groups for p in g["params"]}
        program_point(sys._getframe(1), owned)
    from torch.optim.optimizer import register_optimizer_step_post_hook
    register_optimizer_step_post_hook(post_hook)

atexit.register(save)
'''


class ScriptRun:
    """What the three runs of one script gave."""

    def __init__(self, expected: dict[str, Any], captured: dict[str, Any], restored: dict[str, Any]) -> None:
        self.expected = expected
        self.captured = captured
        self.restored = restored

    def check(self) -> None:
        assert self.captured["exact"], self.captured
        assert "mismatch" not in self.restored, self.restored["mismatch"]
        assert self.restored["problems"] == []
        assert self.expected["lines"], "nothing was traced after the captured step"
        assert self.restored["lines"] == self.expected["lines"]


def native_for(python: str) -> Path:
    """Where an interpreter finds `reft._C`: this one's is installed; others, which have no torch,
    get what knows nothing of tensors, built once per source."""
    if python == sys.executable:
        installed = importlib.util.find_spec("reft")
        assert installed is not None and installed.submodule_search_locations is not None, (
            "reft is not installed: tools/dev build"
        )
        return Path(next(place for place in installed.submodule_search_locations if list(Path(place).glob("_C*.so"))))
    ask = "import sysconfig as s; print(s.get_paths()['include'], s.get_config_var('EXT_SUFFIX'))"
    include, suffix = subprocess.check_output([python, "-c", ask], text=True).split()
    bindings = ROOT / "python" / "bindings"
    files = [bindings / f"{name}.{kind}" for name in ("frames", "sets") for kind in ("cc", "h")]
    text = b"".join(file.read_bytes() for file in files) + include.encode()
    folder = Path(tempfile.gettempdir()) / f"reft-test-frames-{hashlib.sha256(text).hexdigest()[:16]}"
    library = folder / f"_C{suffix}"
    if not library.exists():
        folder.mkdir(exist_ok=True)
        source = folder / "module.cc"
        source.write_text(
            '#include "python/bindings/frames.h"\n#include "python/bindings/sets.h"\n'
            "PYBIND11_MODULE(_C, m) { reft::bindFrames(m); reft::bindSets(m); }\n"
        )
        pybind = subprocess.check_output(
            [sys.executable, "-c", "import torch, os; print(os.path.join(os.path.dirname(torch.__file__), 'include'))"],
            text=True,
        ).strip()
        command = ["g++", "-std=c++20", "-O1", "-fPIC", "-shared", "-fvisibility=hidden", f"-I{ROOT}"]
        command += ["-isystem", include, "-isystem", pybind, str(source), str(bindings / "frames.cc")]
        temporary = folder / f"{os.getpid()}.so"
        subprocess.run([*command, str(bindings / "sets.cc"), "-o", str(temporary)], check=True)
        temporary.rename(library)
    return folder


def other_pythons() -> list[str]:
    """Gives the interpreters that pure-iterator tests run on, this one first; CONTINUATION_PYTHONS=own: no other one."""
    found = [sys.executable]
    if os.environ.get("CONTINUATION_PYTHONS") == "own":
        return found
    for minor in (12, 13):
        if sys.version_info[1] != minor:
            found += [str(p) for p in sorted(Path.home().glob(f".pyenv/versions/3.{minor}.*/bin/python"))[:1]]
    return found


@pytest.fixture(params=other_pythons(), ids=lambda path: str(path).split("/")[-3])
def any_python(request: pytest.FixtureRequest) -> str:
    return str(request.param)


class Zygote:
    """Runs scripts in forks of one process; see zygote.py."""

    def __init__(self, python: str) -> None:
        command = [python, str(Path(__file__).with_name("zygote.py"))]
        command += [str(ROOT / "python" / "reft"), str(native_for(python))]
        environment = dict(os.environ, PYTHONDONTWRITEBYTECODE="1", OMP_NUM_THREADS="1")
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def run(self, folder: Path, environment: dict[str, str]) -> tuple[int, str]:
        """Runs `script.py` of a folder; gives its exit status and what it said."""
        assert self._process.stdin is not None and self._process.stdout is not None
        order = {"folder": str(folder), "environment": environment, "errors": str(folder / "errors")}
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        return int(answer), (folder / "errors").read_text()

    def close(self) -> None:
        self._process.communicate()


@pytest.fixture(scope="session")
def zygotes() -> Iterator[Callable[[str], Zygote]]:
    running: dict[str, Zygote] = {}

    def of(python: str) -> Zygote:
        if python not in running:
            running[python] = Zygote(python)
        return running[python]

    yield of
    for zygote in running.values():
        zygote.close()


@pytest.fixture
def run_script(tmp_path: Path, zygotes: Callable[[str], Zygote]) -> Callable[..., ScriptRun]:
    def run(
        source: str, at: int, python: str = sys.executable, restore_source: str | None = None, limit: int = 1 << 20
    ) -> ScriptRun:
        (tmp_path / "probe.py").write_text(PROBE)
        results: dict[str, Any] = {}
        for mode in ("plain", "capture", "restore"):
            text = restore_source if mode == "restore" and restore_source else source
            (tmp_path / "script.py").write_text(textwrap.dedent(text))
            environment = {
                "PROBE_MODE": mode,
                "PROBE_AT": str(at),
                "PROBE_LIMIT": str(limit),
                "PROBE_FILES": f"{tmp_path}/captured:{tmp_path}/{mode}.json",
            }
            status, said = zygotes(python).run(tmp_path, environment)
            wanted = -signal.SIGKILL if mode == "capture" else 0
            assert status == wanted, f"{mode}: {status}\n{said}"
            results[mode] = json.loads((tmp_path / f"{mode}.json").read_text())
            results[mode]["said"] = said
        return ScriptRun(results["plain"], results["capture"], results["restore"])

    return run
