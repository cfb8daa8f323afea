"""Programs in forked children of this process: undisturbed, captured at a program point, or with
what was captured put back. A pair of them takes seconds, where a job would take a minute.

A program calls `point()` at each program point and `trace(…)` with what it knows there.
"""

from __future__ import annotations

import gc
import os
import pickle
import signal
import sys
import types
from collections.abc import Mapping
from typing import Any

from reft import _continuation

LIMIT_BYTES = 1 << 20
_MOST_SEC = 120


class _Killed(BaseException):
    pass


def child(
    source: str,
    kill: int,
    captured: bytes,
    *,
    names: Mapping[str, Any] | None = None,
    at_each: bool = False,
) -> dict[str, Any]:
    """Runs a program to its end, or to program point `kill` (0: none), where it is captured.

    Args:
        captured: the `place` of an earlier child, which is put back at the first point; b"": none.
        names: further globals of the program.
        at_each: captures at the points before `kill`, too.

    Returns:
        `points` and `lines` (what it traced), `problems` of the restore, and if there was such:
        `place`, `uncaptured`, `exact` of the capture, `refused` by the restore, `error`.
    """
    read, write = os.pipe()
    gc.freeze()  # a collection in the child would copy every page of the parent's objects
    pid = os.fork()
    if pid:
        gc.unfreeze()
    else:
        try:
            os.close(read)
            signal.alarm(_MOST_SEC)
            result = pickle.dumps(_run(source, kill, captured, names or {}, at_each))
            with os.fdopen(write, "wb") as stream:
                stream.write(result)
        finally:
            os.kill(os.getpid(), signal.SIGKILL)  # nothing of the parent's may run at exit
    os.close(write)
    with os.fdopen(read, "rb") as stream:
        data = stream.read()
    os.waitpid(pid, 0)
    if not data:
        return {"error": "the child died", "points": 0, "lines": [], "problems": []}
    return dict(pickle.loads(data))


def _run(
    source: str, kill: int, captured: bytes, names: Mapping[str, Any], at_each: bool
) -> dict[str, Any]:
    result: dict[str, Any] = {"points": 0, "lines": [], "problems": []}

    def point() -> None:
        result["points"] += 1
        frame = sys._getframe(1)
        if captured:
            if result["points"] == 1:
                place, rng = pickle.loads(captured)
                try:
                    result["problems"] = _continuation.plan(frame, place).write().problems
                except _continuation.FrameMismatch as error:
                    result["refused"] = str(error)
                    raise _Killed from error
                _continuation.restore_rng(rng)
                result["lines"].clear()
            return
        _continuation.observe(frame)
        if result["points"] == kill or (kill and at_each):
            place = _continuation.capture(frame, LIMIT_BYTES)
            if result["points"] == kill:
                result["uncaptured"], result["exact"] = place["uncaptured"], place["exact"]
                result["place"] = pickle.dumps((place, _continuation.capture_rng()))
                raise _Killed

    def trace(*values: Any) -> None:
        result["lines"].append(pickle.loads(pickle.dumps(values)))

    _leave_out_tests({getattr(value, "__module__", None) for value in names.values()})
    _continuation.install()
    main = types.ModuleType("__main__")
    main.__dict__.update(names, point=point, trace=trace)
    sys.modules["__main__"] = main
    try:
        exec(compile(source, "program.py", "exec"), main.__dict__)
    except _Killed:
        pass
    except Exception as error:
        result["error"] = f"{type(error).__name__}: {error}"
    return result


def _leave_out_tests(used: set[str | None]) -> None:
    """Takes away the tests that this process has imported: a program's own modules are those that
    it imports, and the constants of all tests are more than a capture may hold."""
    for name in list(sys.modules):
        if name.partition(".")[0] == "tests" and name not in used:
            del sys.modules[name]
