"""What a node measures alone: its processors and GPUs (a product whose result is known), host
memory, copies to and between GPUs, disk, and TCP within the host.

The measurements run in a child process (`python -m reft._check.local`), one after the other, each
with a time limit: a call into a broken device may never return. The child prints a line of JSON
before and after each one. If one does not end in time, or ends the child, that is a fault, and a
new child goes on with the next one (`measure`).

A matrix product has entries of -1, 0 and 1, so that all of its elements are small integers, which
bfloat16 and float32 hold exactly in any order of summation. Its sums by row and by column are known
from the factors alone (computed on the CPU), so one wrong element shows in two of them; and each
repetition must be equal to the first one, bit by bit.

Threads: `measure` has one that reads the child's lines. Errors: none; they are findings.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import json
import mmap
import os
import platform
import queue
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from reft._check import links
from reft._check.evidence import Part
from reft._link import bounded_json, host_memory

_MOST_LINE = 1 << 16
_IMPORT_SEC = 180.0
_KILLED_SEC = 5.0
_SEED = 20
_ODD = 0x9E3779B97F4A7C15  # spreads a counter over all bits
_MIB = 1 << 20
_HARDWARE = (errno.EIO, errno.EROFS, errno.EUCLEAN)


class Wrong(Exception):
    """A test has failed: the hardware is at fault."""


class Skipped(Exception):
    """Nothing can be measured here."""


@dataclass(frozen=True)
class Measurement:
    """One measurement that the child makes.

    Attributes:
        name, kind, unit: see `Part`.
        limit_sec: after so long it counts as hung.
        run: returns the value.
    """

    name: str
    kind: str
    unit: str
    limit_sec: float
    run: Callable[[], float]


def tests(directory: Path, quick: bool) -> list[Measurement]:
    """All of this node's, in the order in which they run."""
    import torch

    cpu = _processor()
    seconds, sizes = (0.3, (64, 16)) if quick else (1.5, (512, 128))
    found = [
        Measurement("cpu matmul", f"cpu matmul {cpu}", "GFLOP/s", 60,
             lambda: _matmul("cpu", torch.float32, 512, seconds) / 1e9),
        Measurement("memory", f"memory {cpu}", "GB/s", 60, lambda: _memory(sizes[0])),
        Measurement("disk", f"disk {_file_system(directory)}", "GB/s", 60,
             lambda: _disk(directory, sizes[1])),
        Measurement("loopback", f"loopback {cpu}", "Gbit/s", 30, lambda: _loopback(seconds)),
    ]  # fmt: skip
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for gpu in range(gpus):
        found += _gpu_tests(gpu, gpus, quick)
    return found


def _gpu_tests(gpu: int, gpus: int, quick: bool) -> list[Measurement]:
    import torch

    device, model = f"cuda:{gpu}", torch.cuda.get_device_name(gpu)
    size, seconds, mebibytes = (4096, 0.5, 64) if quick else (8192, 4.0, 256)

    def matmul(dtype: Any) -> Callable[[], float]:
        return lambda: _matmul(device, dtype, size, seconds) / 1e12

    def copy(to_gpu: bool) -> Callable[[], float]:
        return lambda: _copy(device, to_gpu, mebibytes)

    name = f"gpu {gpu}"
    found = [
        Measurement(f"{name} {what}", f"{kind} {what} {model}", unit, limit_sec, run)
        for what, kind, unit, limit_sec, run in (
            ("matmul bf16", "gpu", "TFLOP/s", 120, matmul(torch.bfloat16)),
            ("matmul fp32", "gpu", "TFLOP/s", 120, matmul(torch.float32)),
            ("copy in", "copy", "GB/s", 60, copy(True)),
            ("copy out", "copy", "GB/s", 60, copy(False)),
        )
    ]
    if gpus > 1:
        other = (gpu + 1) % gpus
        found.append(
            Measurement(
                f"{name} copy to gpu {other}",
                f"copy to gpu {model}",
                "GB/s",
                60,
                lambda: _copy_between(device, f"cuda:{other}", mebibytes),
            )  # fmt: skip
        )
    return found


# -- the parent


def measure(
    directory: Path, quick: bool, clock: Callable[[], float] = time.monotonic
) -> tuple[tuple[Part, ...], float]:
    """All measurements of this node, and the rate of TCP within it in Gbit/s (0: unknown)."""
    parts: list[Part] = []
    first, ends = 0, False
    while not ends:
        command = [sys.executable, "-P", "-m", "reft._check.local", str(directory)]
        command += ["--from", str(first)] + ["--quick"] * quick
        found, first, ends = _child(command, first, clock)
        parts += found
    loopback = [part.value for part in parts if part.kind.startswith("loopback")]
    return tuple(parts), loopback[0] if loopback else 0.0


def _child(
    command: list[str], first: int, clock: Callable[[], float]
) -> tuple[list[Part], int, bool]:
    """Parts from number `first` on, the number of the next one, and whether that was all."""
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
    lines: queue.Queue[bytes | None] = queue.Queue()
    reader = threading.Thread(
        target=_read, args=(child, lines), name="reft-check-local", daemon=True
    )
    reader.start()
    parts: list[Part] = []
    begun: dict[str, Any] | None = None
    until = clock() + _IMPORT_SEC
    problem = ""
    while not problem:
        try:
            line = lines.get(timeout=max(0.0, until - clock()))
        except queue.Empty:
            limit = begun["limit_sec"] if begun else _IMPORT_SEC
            problem = f"did not end within {limit:.0f} s"
            break
        if line is None:
            code = _end(child)
            if code == 0 and begun is None:
                return parts, first, True
            problem = f"its process ended with code {code}"
            break
        message = bounded_json.loads(line, limit=_MOST_LINE)
        if "limit_sec" in message:
            begun = message
            until = clock() + message["limit_sec"]
            continue
        parts.append(Part(**message))
        begun, until, first = None, clock() + _IMPORT_SEC, first + 1
    _end(child)
    if begun is None:
        # Before the first measurement, or between two: not a fault of one device.
        parts.append(Part("start", "start", 0.0, "", fault=f"the measurements {problem}"))
        return parts, first, True
    parts.append(Part(begun["name"], begun["kind"], 0.0, begun["unit"], fault=problem))
    return parts, first + 1, False


def _read(child: subprocess.Popen[bytes], lines: queue.Queue[bytes | None]) -> None:
    assert child.stdout is not None
    with contextlib.suppress(OSError, ValueError):
        while line := child.stdout.readline(_MOST_LINE):
            lines.put(line)
    lines.put(None)


def _end(child: subprocess.Popen[bytes]) -> int:
    """The exit code; a child that a broken device holds is left behind."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        return child.wait(_KILLED_SEC) if child.poll() is None else int(child.returncode)
    child.kill()
    with contextlib.suppress(subprocess.TimeoutExpired):
        return child.wait(_KILLED_SEC)
    return -9


# -- the child


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("--from", type=int, default=0, dest="first")
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args(words)
    for test in tests(args.directory, args.quick)[args.first :]:
        about = {"name": test.name, "kind": test.kind, "unit": test.unit}
        print(json.dumps({**about, "limit_sec": test.limit_sec}), flush=True)
        part = outcome(test)
        print(json.dumps(asdict(part)), flush=True)
        if part.fault:
            # What a device has done to this process is no evidence against the next device.
            os._exit(0 if test.name == "" else 9)


def outcome(test: Measurement) -> Part:
    """Runs a test."""
    value, fault, skipped = 0.0, "", ""
    try:
        value = test.run()
    except Wrong as error:
        fault = str(error)
    except (Skipped, MemoryError) as error:
        skipped = str(error) or "no memory"
    except OSError as error:
        text = error.strerror or str(error)
        fault, skipped = (text, "") if error.errno in _HARDWARE else ("", text)
    except RuntimeError as error:
        text = str(error).splitlines()[0][:150] if str(error) else type(error).__name__
        is_full = type(error).__name__ == "OutOfMemoryError" or "allocate memory" in text
        fault, skipped = ("", "not enough free memory") if is_full else (text, "")
    return Part(test.name, test.kind, value, test.unit, fault, skipped)


def known_product(size: int) -> tuple[Any, Any, Any, Any]:
    """Two int8 matrices, and the sums of their product by row and by column (float32, exact)."""
    import torch

    generator = torch.Generator().manual_seed(_SEED)

    def drawn() -> Any:
        values = torch.randint(0, 8, (size, size), generator=generator, dtype=torch.int8)
        return (values == 1).to(torch.int8) - (values == 0).to(torch.int8)

    a, b = drawn(), drawn()
    ones = torch.ones(size)
    rows = a.float() @ (b.float() @ ones)
    columns = (ones @ a.float()) @ b.float()
    return a, b, rows, columns


def _matmul(device: str, dtype: Any, size: int, seconds: float) -> float:
    """Operations per second.

    Raises:
        Wrong: a result is not the known one.
    """
    import torch

    a, b, rows, columns = known_product(size)
    a, b = a.to(device, dtype), b.to(device, dtype)
    is_gpu = device != "cpu"

    def settle() -> None:
        if is_gpu:
            torch.cuda.synchronize(device)

    first = a @ b
    compare(first, rows, columns)
    rates: list[float] = []
    until = time.monotonic() + seconds
    while time.monotonic() < until or len(rates) < 3:
        settle()
        began = time.perf_counter()
        repeats = 5 if is_gpu else 1
        for _ in range(repeats):
            again = a @ b
        settle()
        rates.append(repeats * 2.0 * size**3 / (time.perf_counter() - began))
        if not torch.equal(again, first):
            raise Wrong("one product, computed twice, gave two results")
    compare(first, rows, columns)
    # Other processes disturb a CPU, and heat slows a GPU.
    return statistics.median(rates) if is_gpu else max(rates)


def compare(product: Any, rows: Any, columns: Any) -> None:
    """Raises `Wrong` if a matrix has not these sums."""
    found = product.float()
    wrong_rows = int((found.sum(1).cpu() != rows).sum())
    wrong_columns = int((found.sum(0).cpu() != columns).sum())
    if wrong_rows or wrong_columns:
        raise Wrong(f"wrong result: {wrong_rows} rows and {wrong_columns} columns of {len(rows)}")


def pattern(count: int, seed: int) -> Any:
    """`count` int64 values, all different."""
    import torch

    odd = _ODD - (1 << 64)
    return torch.arange(seed, seed + count, dtype=torch.int64) * odd


def _memory(mebibytes: int) -> float:
    """GB/s of copies in host memory, read and written bytes together."""
    import torch

    free = host_memory.available_bytes()
    if free is not None:
        mebibytes = min(mebibytes, free // 8 // _MIB)
    if mebibytes < 8:
        raise Skipped("not enough free memory")
    count = mebibytes * _MIB // 8
    source = pattern(count, 1)
    rates: list[float] = []
    target = torch.empty_like(source)
    for turn in range(6):
        began = time.perf_counter()
        target.copy_(source)
        rates.append(2 * 8 * count / (time.perf_counter() - began))
        if not torch.equal(target, source):
            raise Wrong("memory does not hold what was written")
        if turn % 2:
            torch.bitwise_not(source, out=source)  # each bit is 0 and 1
    if not torch.equal(source, pattern(count, 1).bitwise_not_()):
        raise Wrong("memory does not hold what was written")
    return max(rates) / 1e9


def _disk(directory: Path, mebibytes: int) -> float:
    """GB/s of a file that is written, forced to the disk and read back, around the page cache if
    the file system can."""
    place = os.statvfs(directory)
    if place.f_bavail * place.f_frsize < 4 * mebibytes * _MIB:
        raise Skipped("not enough free space")
    file, path = tempfile.mkstemp(prefix="reft-check-", dir=directory)
    try:
        data = pattern(mebibytes * _MIB // 8, 7).numpy().tobytes()
        began = time.perf_counter()
        view, at = memoryview(data), 0
        while at < len(data):
            at += os.write(file, view[at : at + _MIB])
        os.fsync(file)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        at = 0
        for block in _blocks(path, len(data)):
            if block != data[at : at + len(block)]:
                raise Wrong(f"the disk does not hold what was written, at byte {at}")
            at += len(block)
        if at != len(data):
            raise Wrong(f"the disk has {at} of {len(data)} bytes")
        return len(data) / (time.perf_counter() - began) / 1e9
    finally:
        os.close(file)
        os.unlink(path)


def _blocks(path: str, size: int) -> Iterator[bytes]:
    """The contents of a file."""
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        file = os.open(path, flags | os.O_DIRECT)
    except OSError:  # tmpfs
        file = os.open(path, flags)
    try:
        with mmap.mmap(-1, _MIB) as aligned:
            at = 0
            while at < size:
                got = os.preadv(file, [aligned], at)
                if got == 0:
                    return
                yield aligned[:got]
                at += got
    finally:
        os.close(file)


def _loopback(seconds: float) -> float:
    return max(links.within("127.0.0.1", seconds / 3) for _ in range(3))


def _copy(device: str, to_gpu: bool, mebibytes: int) -> float:
    """GB/s between pinned host memory and a GPU."""
    import torch

    host = pattern(mebibytes * _MIB // 8, 3).pin_memory()
    there = host.to(device)
    back = torch.empty_like(host).pin_memory()
    rates: list[float] = []
    for _ in range(5):
        torch.cuda.synchronize(device)
        began = time.perf_counter()
        if to_gpu:
            there.copy_(host)
        else:
            back.copy_(there)
        torch.cuda.synchronize(device)
        rates.append(8 * host.numel() / (time.perf_counter() - began))
    if not torch.equal(there.cpu(), host) or not (to_gpu or torch.equal(back, host)):
        raise Wrong("a copy differs from what was copied")
    return max(rates) / 1e9


def _copy_between(device: str, other: str, mebibytes: int) -> float:
    """GB/s from one GPU to another one."""
    import torch

    data = pattern(mebibytes * _MIB // 8, 5).to(device)
    target = torch.empty_like(data, device=other)
    rates: list[float] = []
    for _ in range(5):
        torch.cuda.synchronize(device)
        torch.cuda.synchronize(other)
        began = time.perf_counter()
        target.copy_(data)
        torch.cuda.synchronize(device)
        torch.cuda.synchronize(other)
        rates.append(8 * data.numel() / (time.perf_counter() - began))
    if not torch.equal(target.cpu(), data.cpu()):
        raise Wrong("a copy differs from what was copied")
    return max(rates) / 1e9


def _processor() -> str:
    """Model of the CPU, and how many of its cores this process may use."""
    found = ""
    with contextlib.suppress(OSError):
        match = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.M)
        found = match[1].strip() if match else ""
    return f"{found or platform.machine()} x {len(os.sched_getaffinity(0))}"


def _file_system(directory: Path) -> str:
    """Type of the file system of a directory, "" if unknown."""
    best, kind = "", ""
    with contextlib.suppress(OSError):
        place = f"{directory.resolve()}/"
        for line in Path("/proc/self/mounts").read_text().splitlines():
            at, name = line.split()[1:3]
            if place.startswith(f"{at.rstrip('/')}/") and len(at) >= len(best):
                best, kind = at, name
    return kind


if __name__ == "__main__":
    main()
