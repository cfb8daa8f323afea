"""Builds: the editable install, trees without torch, wheels."""

from __future__ import annotations

import fcntl
import hashlib
import sys
import tempfile
import zipfile
from pathlib import Path

from .machine import (
    CLANG_PACKAGES,
    NEWEST_TORCH,
    ROOT,
    TORCH,
    Failed,
    apt,
    jobs,
    pip_install,
    python,
    run,
    use_venv,
    venv_dir,
)  # fmt: skip

FOLDERS = ["intercept", "snapshot", "hang_detect", "c10d_backend", "agent", "python", "tests"]
CONFIG = "--config-settings"  # its short form, -C, is newer than Debian 12's pip
# Top-level names of a wheel; anything else is not the product.
WHEEL_NAMES = {"reft", "reft_autoload.py"}
WHEEL_FILES = ["reft/lib/libreft.so", "reft/lib/libreft_intercept.so", "reft/lib/libreft_preload.so",
               "reft/bin/reft-agent", "reft/bin/reft-unwind", "reft/bin/reft-health", "reft/_cli/main.py",
               "reft/_cli/pages/verdict.css", "reft_autoload.py"]  # fmt: skip


def build_dir() -> Path:
    """One build tree for each virtual environment: the binaries fit one torch."""
    own = venv_dir() == ROOT / ".venv"
    return ROOT / ("build" if own else f"build-{venv_dir().name.lstrip('.')}")


def recipe() -> str:
    """A hash of what the configuration depends on besides sources."""
    digest = hashlib.sha256(str(venv_dir()).encode())
    files = [ROOT / "CMakeLists.txt", ROOT / "pyproject.toml", *sorted((ROOT / "cmake").glob("*.*"))]
    files += [ROOT / folder / "CMakeLists.txt" for folder in FOLDERS]
    for path in files:
        digest.update(path.read_bytes())
    return digest.hexdigest()


def build_editable(*, werror: bool = False, tests: bool = True) -> None:
    """The package in .venv, and the C++ tests, in one build tree; a second if nothing changed.

    A build without tests keeps those of an earlier build with them.
    """
    use_venv(torch=TORCH, tests=tests)
    build_dir().mkdir(exist_ok=True)
    # Two at a time would overwrite each other's files.
    with open(ROOT / "pyproject.toml") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        build_editable_locked(werror, tests)


def build_editable_locked(werror: bool, tests: bool) -> None:
    stamp = build_dir() / ".dev-editable"
    # A stricter build, or one with tests, makes the same binaries.
    usable = {
        f"{recipe()} werror={strict} tests={more}"
        for strict in {werror, True}
        for more in {tests, True}
    }
    ready = stamp.exists() and stamp.read_text() in usable
    if ready and (build_dir() / "build.ninja").exists():
        run(["cmake", "--build", build_dir(), "-j", str(jobs())])
        run(["cmake", "--install", build_dir()])
        return
    stamp.unlink(missing_ok=True)
    install(build_dir(), editable=True, tests=tests, werror=werror)
    stamp.write_text(f"{recipe()} werror={werror} tests={tests}")


def install(build: Path, *, editable: bool, tests: bool, werror: bool = False) -> None:
    """pip install, with output while it compiles."""
    definitions = {
        "REFT_BUILD_TESTS": "ON" if tests else "OFF",
        "REFT_WERROR": "ON" if werror else "OFF",
        # Who builds tests, too, builds again after small changes; CI does not.
        "REFT_BATCH": "OFF" if tests and not werror else "ON",
        "REFT_PYTHON": str(python()),
    }
    words: list[str | Path] = [python(), "-m", "pip", "install", "-v"]
    words += ["--disable-pip-version-check", "--no-build-isolation", "--no-deps"]
    words += ["--force-reinstall", CONFIG, f"build-dir={build}"]
    for name, value in definitions.items():
        words += [CONFIG, f"cmake.define.{name}={value}"]
    run([*words, *(["-e"] if editable else []), ROOT], env=parallel())


def parallel() -> dict[str, str]:
    """The environment in which pip's builds use ninja and all cores."""
    return {"CMAKE_GENERATOR": "Ninja", "CMAKE_BUILD_PARALLEL_LEVEL": str(jobs())}


def build_newest() -> None:
    use_venv(torch=NEWEST_TORCH, name=".venv-newest")
    pip_install(["--upgrade", "torch"])
    # Not editable: the binaries of the source tree belong to the pinned torch.
    install(ROOT / "build-newest", editable=False, tests=False)


def configure_plain(name: str, *definitions: str) -> Path:
    """Configures a build tree of its own, without torch."""
    use_venv()
    tree = ROOT / f"build-{name}"
    fixed = ["-G", "Ninja", "-DREFT_WITH_TORCH=OFF", "-DREFT_WERROR=ON"]
    run(["cmake", "-S", ROOT, "-B", tree, *fixed, *definitions])
    return tree


def build_plain(name: str, *definitions: str) -> Path:
    tree = configure_plain(name, *definitions)
    run(["cmake", "--build", tree, "-j", str(jobs())])
    return tree


def clang_definitions() -> list[str]:
    apt(CLANG_PACKAGES)
    return ["-DCMAKE_CXX_COMPILER=clang++", "-DCMAKE_C_COMPILER=clang"]


def build_wheel() -> list[Path]:
    """Builds dist/*.whl; the wheels with the product and nothing else.

    Raises:
        Failed: a wheel lacks a part of the product, or has more than the product.
    """
    use_venv(torch=TORCH)
    dist = ROOT / "dist"
    words: list[str | Path] = [python(), "-m", "pip", "wheel", "--disable-pip-version-check"]
    words += ["--no-build-isolation", "--no-deps", CONFIG, f"build-dir={ROOT / 'build-wheel'}"]
    words += [CONFIG, f"cmake.define.REFT_PYTHON={python()}", "-w", dist]
    run([*words, ROOT], env=parallel())
    wheels = sorted(dist.glob("reft-*.whl"))
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive, tempfile.TemporaryDirectory() as folder:
            wrong = wrong_in_wheel(archive.namelist())
            if wrong:
                raise Failed(f"{wheel.name}: {wrong}")
            archive.extractall(folder)
            run([sys.executable, ROOT / "tools" / "check_hardening", folder])
    return wheels


def wrong_in_wheel(names: list[str]) -> str:
    """What a wheel with these files lacks or has too much, "" if it is the product alone."""
    metadata = [name for name in names if name.split("/")[0].endswith(".dist-info")]
    wanted = [*WHEEL_FILES]
    missing = [name for name in wanted if name not in names]
    missing += (
        []
        if any(name.startswith("reft/_C.") and name.endswith(".so") for name in names)
        else ["reft/_C"]
    )
    for text in ("LICENSE", "THIRD_PARTY_NOTICES"):
        missing += [] if any(name.endswith(f"/{text}") for name in metadata) else [text]
    more = [name for name in set(names) - set(metadata) if name.split("/")[0] not in WHEEL_NAMES]
    more += [name for name in names if names.count(name) > 1]
    text = [f"missing: {' '.join(missing)}"] if missing else []
    text += [f"not of the product: {' '.join(sorted(set(more)))}"] if more else []
    return "; ".join(text)
