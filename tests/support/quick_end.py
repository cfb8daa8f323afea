"""The end of a process that was forked from one with torch: as Python's own, but for the teardown of
all modules, which takes a second of processor time.

Threads: the main one.
"""

from __future__ import annotations

import atexit
import ctypes
import sys
import threading
from collections.abc import Callable


def quick_end(run: Callable[[], object]) -> None:
    """Runs a script, waits for its threads, does what it has registered for its end, and ends the
    process with the exit status that Python would give it."""
    for name in ("tests", "tests.support", __name__):
        sys.modules.pop(name, None)  # they would count as the script's own
    code = 0
    try:
        run()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if code == 1 and isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    ctypes.CDLL(None).exit(code)  # with what C and C++ do at the end, reft's good-bye among it
