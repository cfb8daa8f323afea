"""Stages of tests: C++, Python, sanitizers, fuzzing, other versions of torch and Python."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from .build import build_dir, build_plain, clang_definitions, install
from .machine import (
    NEWEST_TORCH,
    PYTHONS,
    ROOT,
    TORCH,
    Failed,
    jobs,
    other_pythons,
    python,
    run,
    use_venv,
)  # fmt: skip
from .results import Counts, junit

SHOWN_FUZZER_LINES = 30
# Jobs wait for each other and for deadlines half of their time; see tests/conftest.py.
AT_A_TIME = ["-n", str(min(jobs() + 1, 4))]
# The tests of iterators otherwise run under every Python that the machine has.
OWN_PYTHON = {"CONTINUATION_PYTHONS": "own"}
SANITIZERS = {
    "asan": (
        "address",
        {
            # Up to LLVM 16, the interceptor takes some thread-local blocks for those of a glibc
            # before 2.25 and reads a size before them that is not there: the leak check crashes.
            "ASAN_OPTIONS": "abort_on_error=1:detect_stack_use_after_return=1"
            ":intercept_tls_get_addr=0",
            "UBSAN_OPTIONS": "print_stacktrace=1",
        },
    ),
    "tsan": ("thread", {"TSAN_OPTIONS": "halt_on_error=1:second_deadlock_stack=1"}),
}
BACKEND_TESTS = [
    "tests/integration/test_backend_cases.py",
    "tests/integration/test_backend_autoload.py",
    "tests/unit/c10d_backend",
]
# What depends on the version of Python: frames, iterators, values.
PYTHON_TESTS = [
    "tests/unit/continuation/test_iterators.py",
    "tests/unit/continuation/test_values.py",
    "tests/resume/test_resume_scripts.py",
]


def ctest(counts: Counts, stage: str, tree: Path, env: dict[str, str] | None = None) -> None:
    started = time.monotonic()
    report = tree / "ctest.xml"
    report.unlink(missing_ok=True)
    words: list[str | Path] = ["ctest", "--test-dir", tree, "--output-on-failure"]
    words += ["--no-tests=error", "-j", str(jobs()), "--output-junit", report]
    junit(counts, stage, report, run(words, check=False, env=env), started)


def pytest(counts: Counts, fast: bool, ci: bool, extra: Sequence[str]) -> None:
    """CI leaves out cases marked `more`, and those that have not begun at `counts.latest_start`.

    In CI, a case that fails runs once more, alone: whole jobs with deadlines run on machines of
    any load. The end of the log names each case that needed it, and failing twice is a failure.
    Cases marked `exact` have one try: what they find wrong once is wrong."""
    started = time.monotonic()
    report, again = build_dir() / "pytest.xml", build_dir() / "pytest-again.xml"
    report.unlink(missing_ok=True)
    again.unlink(missing_ok=True)
    words: list[str | Path] = [python(), "-m", "pytest", "-q", *extra]
    words += ["--durations=40", "--durations-min=10"]
    if fast or ci:
        words += ["-m", " and ".join(["not slow"] * fast + ["not more"] * ci)]
    env = None
    if ci:  # the other Pythons have stages of their own
        env = OWN_PYTHON | {"TESTS_LATEST_START": str(counts.latest_start)}
    code = run(
        [*words, *(AT_A_TIME if ci else []), f"--junitxml={report}"], check=False, env=env
    )
    if ci and code == 1:
        once_more = ["--last-failed", "--last-failed-no-failures=none", "-m", "not exact"]
        run([*words, *once_more, f"--junitxml={again}"], check=False, env=OWN_PYTHON)
    junit(counts, "python", report, 0 if code == 5 else code, started, again)


def script_of(folder: str, name: str, suffix: str) -> Path:
    found = ROOT / "tests" / folder / f"{name}{suffix}.py"
    if not found.exists():
        paths = found.parent.glob(f"*{suffix}.py")
        names = sorted(path.name[: -len(suffix + ".py")] for path in paths)
        raise Failed(f"no {folder} is called '{name}'; choose from: {', '.join(names) or 'none'}")
    return found


def sanitizer_tree(name: str) -> Path:
    """The tree of the address sanitizer has the fuzz targets, too, which need clang."""
    more = ["-DREFT_FUZZ=ON", *clang_definitions()] if name == "asan" else []
    sanitize = f"-DREFT_SANITIZE={SANITIZERS[name][0]}"
    return build_plain(name, "-DREFT_BUILD_TESTS=ON", sanitize, *more)


@contextlib.contextmanager
def trees_beside(wanted: bool) -> Iterator[None]:
    """Has the trees of sanitizers and fuzzers built in the time that other tests leave idle, as far
    as that goes. What fails there fails, and is shown, when the rest is built for their own
    tests."""
    if not wanted:
        yield
        return
    with (build_dir() / "trees.log").open("w") as log:
        words = [sys.executable, ROOT / "tools" / "dev", "trees"]
        builder = subprocess.Popen(words, stdout=log, stderr=log, process_group=0)
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(builder.pid, signal.SIGINT)  # ninja leaves no half of a file
        builder.wait()


def sanitize(counts: Counts, name: str) -> None:
    ctest(counts, name, sanitizer_tree(name), SANITIZERS[name][1])


def fuzz(counts: Counts, seconds: int) -> None:
    tree = sanitizer_tree("asan")

    def run_one(name: str) -> tuple[str, int, float]:
        started = time.monotonic()
        corpus = tree / "corpus" / name
        corpus.mkdir(parents=True, exist_ok=True)
        artifacts = f"-artifact_prefix={tree}/{name}-"
        words = [tree / "tests" / name, f"-max_total_time={seconds}", "-print_final_stats=1"]
        return name, run([*words, artifacts, corpus], check=False, log=tree / f"{name}.log"), started

    names = sorted(source.stem for source in (ROOT / "tests" / "fuzz").glob("*_fuzz.cc"))
    with ThreadPoolExecutor(jobs()) as pool:
        for name, code, started in pool.map(run_one, names):
            add_fuzzed(counts, name, code, tree / f"{name}.log", started)


def add_fuzzed(counts: Counts, name: str, code: int, log: Path, started: float) -> None:
    lines = log.read_text(errors="replace").splitlines()
    done = [line for line in lines if line.startswith("Done ")]
    last = "\n    ".join(lines[-SHOWN_FUZZER_LINES:] if code else done)
    print(f"    {last}")
    if code:  # what it found, and the input in base64
        counts.failures.append(f"-- fuzz {name}\n    {last}")
    counts.add_exit_code(f"fuzz {name}", code, started)


def other_versions(counts: Counts) -> None:
    """The tests that can tell, under the newest torch on PyPI with the newest Python here, and
    under the pinned torch with the others."""
    found = other_pythons()
    newest = max(found, default="", key=PYTHONS.index)
    for version in PYTHONS[::-1]:
        torch = NEWEST_TORCH if version == newest else TORCH
        stage = f"newest torch, Python {version}" if version == newest else f"Python {version}"
        if version in found:
            if counts.in_time(stage):
                in_other_venv(counts, stage, f".venv-{version}", found[version], torch)
        elif version != f"{sys.version_info.major}.{sys.version_info.minor}":
            print(f"{stage}: not on this machine, or without venv or headers", flush=True)
            counts.add(stage, 0, 0, 1, time.monotonic())
    if not found:
        interpreter = Path(sys.executable)
        in_other_venv(counts, "newest torch", ".venv-newest", interpreter, NEWEST_TORCH)


def in_other_venv(counts: Counts, stage: str, name: str, interpreter: Path, torch: str) -> None:
    """Builds reft and runs tests in a virtual environment that exists no longer than this: it takes
    5 GiB.

    Not editable, as the binaries of the source tree belong to the main one.
    """
    started = time.monotonic()
    try:
        use_venv(torch=torch, name=name, interpreter=interpreter)
        # The flags of the main build: ccache has its objects.
        install(build_dir(), editable=False, tests=False, werror=True)
        report = build_dir() / "pytest.xml"
        for what, tests in [
            ("backend", BACKEND_TESTS),
            ("resume", [*PYTHON_TESTS, "-m", "not slow and not one_python"]),
        ]:
            if what == "resume" or torch == NEWEST_TORCH:
                report.unlink(missing_ok=True)
                words: list[str | Path] = [python(), "-m", "pytest", "-q", *AT_A_TIME]
                code = run([*words, f"--junitxml={report}", *tests], check=False, env=OWN_PYTHON)
                junit(counts, f"{stage}, {what}", report, code, started)
    except Failed as error:
        print(f"tools/dev: {error}", flush=True)
        counts.add(stage, 0, 1, 0, started)
    finally:
        shutil.rmtree(ROOT / name, ignore_errors=True)
