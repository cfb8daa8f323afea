"""The machine: runs commands, installs missing packages, makes virtual environments."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TORCH = "torch==2.11.0"
NEWEST_TORCH = "torch>=2.11"
PYTHONS = ["3.11", "3.12", "3.13"]
# Exact versions, so that a new release of a tool is a commit here and changes no build by itself.
INSTALLER = "uv==0.13.9"
BUILD_TOOLS = ["cmake==4.4.5", "ninja==1.13.2"]
PRODUCT_TOOLS = ["numpy==2.4.6", "scikit-build-core==1.1.2", "click==8.5.1", "rich==15.0.0"]
TEST_TOOLS = [
    "pytest==9.2.0", "pytest-timeout==2.4.0", "pytest-xdist==3.8.0", "hypothesis==6.170.17",
    "expecttest==0.3.0", "tqdm==4.70.1", "ruff==0.17.6", "mypy==2.4.1",
]  # fmt: skip
# Debian package -> what shows that it is there: a program, or an absolute path.
PRODUCT_PACKAGES = {
    "g++": "c++", "binutils": "nm", "libspdlog-dev": "/usr/include/spdlog/spdlog.h",
    "libfmt-dev": "/usr/include/fmt/format.h", "libxxhash-dev": "/usr/include/xxhash.h",
    "nlohmann-json3-dev": "/usr/include/nlohmann/json.hpp",
    "libssl-dev": "/usr/include/openssl/sha.h",
    "libunwind-dev": "/usr/lib/x86_64-linux-gnu/libunwind-x86_64.a",
}  # fmt: skip
TEST_PACKAGES = {
    "libgtest-dev": "/usr/include/gtest/gtest.h", "libgmock-dev": "/usr/include/gmock/gmock.h",
    "ccache": "ccache",
}  # fmt: skip
CLANG_PACKAGES = {"clang": "clang++"}
LINT_PACKAGES = {"clang-format": "clang-format", "clang-tidy": "clang-tidy"}


class Failed(Exception):
    """A step did not work; the text says what and what to do."""


def jobs() -> int:
    """Parallel compilations: a core each, but torch's headers take 1.5 GiB per compiler."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") >> 30
    return max(1, min(len(os.sched_getaffinity(0)), int(memory / 1.5)))


def run(
    command: Sequence[str | Path],
    *,
    check: bool = True,
    cwd: Path = ROOT,
    env: dict[str, str] | None = None,
    log: Path | None = None,
) -> int:
    """Prints and runs a command, its output to the log if there is one; returns its exit code."""
    words = [str(word) for word in command]
    prefix = "".join(f"{name}={shlex.quote(value)} " for name, value in (env or {}).items())
    print(f"+ {prefix}{shlex.join(words)}", flush=True)
    # ninja and cmake are looked up by name: those of the virtual environment come first.
    path = f"{venv_dir() / 'bin'}{os.pathsep}{os.environ['PATH']}"
    # Without these two, ccache takes the same source for another one in every build tree.
    ccache = {"CCACHE_NOHASHDIR": "1", "CCACHE_BASEDIR": str(ROOT)}
    full = {**os.environ, "PATH": path, **ccache, **(env or {})}
    # Images of containers often set it. Every rank of every test would compile reft's modules.
    full.pop("PYTHONDONTWRITEBYTECODE", None)
    with log.open("w") if log else contextlib.nullcontext() as sink:
        done = subprocess.run(words, cwd=cwd, env=full, check=False, stdout=sink, stderr=sink)
    if done.returncode != 0 and check:
        raise Failed(f"exit code {done.returncode}: {shlex.join(words)}")
    return done.returncode


# --------------------------------------------------------------------------------------------------
# Packages of the distribution


def apt(packages: dict[str, str]) -> None:
    """Installs the packages whose program or file is missing."""
    missing = [
        package
        for package, probe in packages.items()
        if not (Path(probe).exists() if probe.startswith("/") else shutil.which(probe))
    ]
    if not missing:
        return
    names = " ".join(missing)
    if not shutil.which("apt-get"):
        raise Failed(f"missing: {names} (Debian's names), and no apt-get: install them by hand")
    sudo: list[str] = []
    if os.geteuid() != 0:
        if not shutil.which("sudo"):
            raise Failed(
                f"missing, and neither root nor sudo: run as root: apt-get install {names}"
            )
        sudo = ["sudo"]
    get = ["apt-get", "-o", "DPkg::Lock::Timeout=120"]
    run([*sudo, *get, "update", "-q"], check=False)
    quiet = ["env", "DEBIAN_FRONTEND=noninteractive"]
    run([*sudo, *quiet, *get, "install", "-y", "-q", "--no-install-recommends", *missing])


def python_packages() -> None:
    """Installs headers and venv of the Python that runs this, which Debian splits off."""
    if sys.version_info < (3, 11):  # noqa: UP036
        version = sys.version.split()[0]
        raise Failed(f"Python {version} is too old: run tools/dev with python3.11 or newer")
    needed = {}
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    if importlib.util.find_spec("ensurepip") is None:
        needed[f"python{version}-venv"] = "/nonexistent"
    if not (Path(sysconfig.get_path("include")) / "Python.h").exists():
        needed[f"python{version}-dev"] = "/nonexistent"
    apt(needed)


def other_pythons() -> dict[str, Path]:
    """Other supported versions of Python on this machine: on the PATH, or among pyenv's."""
    # One of pyenv's stand-ins exists for every version and works for the chosen ones; Debian's may
    # lack headers or venv.
    probe = (
        "import ensurepip, os, sys, sysconfig; "
        "sys.exit(not os.path.exists(sysconfig.get_path('include') + '/Python.h'))"
    )
    found = {}
    for version in PYTHONS:
        named = shutil.which(f"python{version}")
        candidates = [Path(named)] if named else []
        pattern = f".pyenv/versions/{version}.*/bin/python{version}"
        candidates += sorted(Path.home().glob(pattern))
        for path in candidates:
            tried = subprocess.run([path, "-c", probe], capture_output=True, check=False)
            if tried.returncode == 0:
                found[version] = path
                break
    found.pop(f"{sys.version_info.major}.{sys.version_info.minor}", None)
    return found


# --------------------------------------------------------------------------------------------------
# Virtual environments

_venv = ROOT / ".venv"


def venv_dir() -> Path:
    return _venv


def python() -> Path:
    return venv_dir() / "bin" / "python"


def pip_install(requirements: Sequence[str]) -> None:
    """Installs what is not recorded as installed; a second call costs nothing."""
    digest = hashlib.sha256(" ".join(requirements).encode()).hexdigest()[:16]
    stamp = venv_dir() / f".dev-{digest}"
    if not stamp.exists():
        pip = [python(), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
        # uv unpacks torch's 5 GiB in a fifth of pip's time, and a second time links them.
        # It reads no settings of pip: where pip has other sources than PyPI, pip installs.
        done = False
        if not pip_has_sources():
            uv = venv_dir() / "bin" / "uv"
            if not uv.exists():
                run([*pip, INSTALLER])
            words = [uv, "pip", "install", "-q", "--system-certs", "--compile-bytecode"]
            words += ["--python", python()]
            done = run([*words, *requirements], check=False) == 0
        if not done:
            run([*pip, *requirements])
        stamp.write_text("\n".join(requirements) + "\n")


@functools.cache
def pip_has_sources() -> bool:
    """Whether pip is set to other indexes than PyPI, or reaches it through a proxy."""
    words = [python(), "-m", "pip", "config", "list"]
    listed = subprocess.run(words, capture_output=True, text=True, check=False).stdout
    names = {line.partition("=")[0].rpartition(".")[2].strip("'") for line in listed.splitlines()}
    return bool(names & {"index-url", "extra-index-url", "no-index", "proxy", "trusted-host"})


def use_venv(
    *,
    torch: str = "",
    name: str = ".venv",
    interpreter: str | Path = sys.executable,
    tests: bool = True,
) -> None:
    """Makes .venv, or another one, with the build tools.

    Args:
        torch: requirement; "" installs neither torch nor the Python tools.
        tests: the tools of the tests, too.
    """
    global _venv
    own = os.environ.get("DEV_VENV") and name == ".venv"
    if own:
        _venv = Path(os.environ["DEV_VENV"]).resolve()
        if not python().exists():
            raise Failed(f"DEV_VENV is {_venv}: no Python there")
    else:
        _venv = ROOT / name
    python_packages()
    apt(PRODUCT_PACKAGES | (TEST_PACKAGES if tests else {}))
    if not python().exists():
        run([interpreter, "-m", "venv", venv_dir()])
    pip_install(BUILD_TOOLS)
    if torch:
        if not own:
            pip_install([torch])
        pip_install(PRODUCT_TOOLS)
        if tests:
            pip_install(TEST_TOOLS)
