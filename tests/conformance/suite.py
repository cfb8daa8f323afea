"""Runs tests of torch's own distributed suite under one backend, one after the other, in one
process tree.

The suite is ``torch.testing._internal.distributed.distributed_test``, a part of the torch wheel:
nothing of it is kept here. It is meant to start fresh interpreters for each test; here the ranks
are forked from this process, which has imported torch already and does nothing else, so a test
costs tenths of a second instead of seconds.

A backend that is not gloo is run with gloo's own skip lists: the conditions of the suite are
evaluated while it is imported, and at that time the name is gloo's. While tests run, the name is
the backend's own, and compares equal to ``"gloo"`` as well, so a test takes the branch that it
takes for gloo. Profiler events are looked for under gloo's
name: a backend that forwards to another one leaves the events of that one as they are.

Used by ``run_distributed_tests.py``; writes one JSON line per test.
"""

from __future__ import annotations

import argparse
import atexit
import importlib
import json
import multiprocessing
import multiprocessing.connection
import os
import shutil
import signal
import sys
import tempfile
import time
import unittest
from pathlib import Path
from typing import Any

REFERENCE = "gloo"
MODULE = "torch.testing._internal.distributed.distributed_test"


class BackendName(str):
    """A backend's name that also compares equal to the reference's."""

    def __eq__(self, other: object) -> bool:
        return str.__eq__(self, other) or other == REFERENCE

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = str.__hash__


def load(backend: str, world: int) -> Any:
    """Imports the suite, for a backend and a number of ranks.

    Raises:
        RuntimeError: torch does not know the backend.
    """
    os.environ.update(BACKEND=REFERENCE, WORLD_SIZE=str(world), INIT_METHOD="env://", CUDA_VISIBLE_DEVICES="")
    os.environ.setdefault("TEMP_DIR", tempfile.gettempdir())
    import torch
    import torch.distributed as dist
    from torch.testing._internal import common_distributed as common_distributed_module

    common_distributed: Any = common_distributed_module

    torch.set_num_threads(1)
    name: str = REFERENCE
    if backend != REFERENCE:
        if backend not in dist.Backend.backend_list:
            raise RuntimeError(f"torch knows no backend {backend!r}: is its package installed for {sys.executable}?")
        name = BackendName(backend)
        cases = common_distributed.DistTestCases
        for feature in ("gpu", "cuda", "ddp", "subgroup", "plugin"):
            cases.backend_feature[feature].add(backend)
    if world >= 3:
        # Left to worlds of 8 ranks there, to keep machines with few GPUs from running them; ranks 0
        # to 2 are enough.
        common_distributed.skip_if_small_worldsize = lambda test: test
    suite: Any = importlib.import_module(MODULE)
    if backend != REFERENCE:
        suite.BACKEND = name
        for names in (
            suite.PROFILING_SUPPORTED_BACKENDS,
            suite.CUDA_PROFILING_SUPPORTED_BACKENDS,
            suite.SEND_RECV_PROFILING_SUPPORTED_BACKENDS,
        ):
            names.append(backend)
        find = suite.get_profiling_event

        def find_reference_events(event: str, *args: Any, **options: Any) -> Any:
            prefix, colon, rest = event.partition(":")
            found = find(REFERENCE + colon + rest if prefix == backend else event, *args, **options)
            for each in found if prefix == backend else []:
                each.name = each.name.replace(REFERENCE, backend, 1)
            return found

        suite.get_profiling_event = find_reference_events
    # The first barrier of a test waits for the other ranks to start: 10 s are too few on a loaded
    # machine.
    suite.Barrier.sync.__func__.__defaults__ = (None, 60)
    for lazy in ("torch._dynamo", "torch.profiler", "torch.distributed.algorithms.ddp_comm_hooks.default_hooks"):
        importlib.import_module(lazy)
    return suite


def make_case(suite: Any, timeout_sec: float, log: Path) -> type[unittest.TestCase]:
    """The suite's tests as a class whose ranks are forked and write to `log`."""

    class Conformance(suite.TestDistBackend, suite.DistributedTest._DistTestBase):  # type: ignore[misc]
        def setUp(self) -> None:
            super().setUp()
            context: Any = multiprocessing.get_context("fork")
            self._start_processes(context.Process)

        @classmethod
        def _run(cls, rank: int, test_name: str, file_name: str, pipe: Any, **options: Any) -> None:
            atexit._clear()  # what the parent has registered is the parent's
            descriptor = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            os.dup2(descriptor, 1)
            os.dup2(descriptor, 2)
            os.close(descriptor)
            os.environ["RANK"] = os.environ["LOCAL_RANK"] = str(rank)
            os.environ["LOCAL_WORLD_SIZE"] = os.environ["WORLD_SIZE"]
            try:
                super()._run(rank, test_name, file_name, pipe, **options)
            finally:
                atexit._run_exitfuncs()

        def _join_processes(self, fn: Any) -> None:
            """As the base's, but woken by the end of a rank instead of polling ten times a second."""
            deadline = time.monotonic() + timeout_sec
            while alive := [process for process in self.processes if process.exitcode is None]:
                left = deadline - time.monotonic()
                if any(process.exitcode == self.TEST_ERROR_EXIT_CODE for process in self.processes):
                    left = min(left, 5.0)  # the others may still have an error of their own to tell
                if not multiprocessing.connection.wait([process.sentinel for process in alive], timeout=max(0.0, left)):
                    break
            try:
                self._check_return_codes(fn, timeout_sec - (deadline - time.monotonic()))
            finally:
                for pipe in self.pid_to_pipe.values():
                    pipe.close()

        def tearDown(self) -> None:
            for process in self.processes:
                if process.exitcode is None:
                    process.kill()
                process.join()
            super().tearDown()

    return Conformance


def run_one(case: type[unittest.TestCase], name: str) -> tuple[str, str]:
    """Runs a test: outcome "passed", "failed" or "skipped", and the reason."""
    result = unittest.TestResult()
    case(name).run(result)
    if result.errors or result.failures:
        return "failed", (result.errors + result.failures)[0][1]
    if result.skipped:
        return "skipped", result.skipped[0][1]
    return "passed", ""


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--backend", default=REFERENCE)
    options.add_argument("--world", type=int, default=2)
    options.add_argument("--timeout-sec", type=float, default=60)
    options.add_argument("--results", help="JSON lines are appended here")
    options.add_argument("--logs", help="directory for the output of tests that fail")
    options.add_argument("--list", action="store_true", help="print the names and exit")
    options.add_argument("tests", nargs="*")
    args = options.parse_args()

    suite = load(args.backend, args.world)
    if args.list:
        print("\n".join(unittest.TestLoader().getTestCaseNames(suite.DistributedTest._DistTestBase)))
        return 0

    logs = Path(args.logs)
    scratch = Path(tempfile.mkdtemp(prefix="cf"))  # short: sockets live below it
    os.environ.update(
        TMPDIR=str(scratch),
        REFT_RUN_DIR=str(scratch / "r"),
        REFT_AGENT_LINGER_SEC="0",
        REFT_RESUME="off",
        REFT_BANNER="0",
    )
    tempfile.tempdir = str(scratch)
    multiprocessing.set_start_method("fork", force=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        with open(args.results, "a", encoding="utf-8", buffering=1) as results:
            for number, name in enumerate(args.tests):
                os.environ["REFT_JOB_ID"] = f"conformance-{os.getpid()}-{number}"  # tests share nothing
                log = logs / f"{args.backend}-{name}.log"
                log.unlink(missing_ok=True)
                results.write(json.dumps({"test": name, "outcome": "started"}) + "\n")
                begin = time.monotonic()
                outcome, reason = run_one(make_case(suite, args.timeout_sec, log), name)
                seconds = round(time.monotonic() - begin, 2)
                if outcome != "failed":
                    log.unlink(missing_ok=True)
                row = {"test": name, "outcome": outcome, "reason": reason, "seconds": seconds}
                results.write(json.dumps(row) + "\n")
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
