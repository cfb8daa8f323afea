"""Runs scripts in forks of a process that has imported torch already: many short runs for the price
of one import.

    zygote.py FOLDER…    those in which `reft._continuation` and `reft._C` are found

Reads one JSON object a line from stdin ({"folder", "environment", "errors"}), answers each with the
exit status of the run.
"""

from __future__ import annotations

import atexit
import gc
import importlib.util
import json
import os
import runpy
import sys
import threading
import types
from collections.abc import Callable


def run_to_the_end(run: Callable[[], object]) -> None:
    """Runs a script and ends the process as Python would, but for the teardown of torch's modules,
    which takes a second of processor time."""
    code = 0
    try:
        run()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def main() -> None:
    package = types.ModuleType("reft")  # the package itself needs torch; its continuation does not
    package.__path__ = sys.argv[1:]
    sys.modules["reft"] = package
    if importlib.util.find_spec("torch"):
        import numpy  # noqa: F401
        import torch.utils.data

        torch.set_num_threads(1)  # no pool of threads that a fork would lose
        weight = torch.nn.Parameter(torch.zeros(1))
        weight.square().backward()
        torch.optim.SGD([weight], lr=0.0).step()  # imports what torch imports late
        next(iter(torch.utils.data.DataLoader([weight.detach()], shuffle=True)))
    from reft import _continuation  # noqa: F401

    gc.freeze()  # a collection in a child would copy every page that holds an object
    for line in sys.stdin:
        order = json.loads(line)
        child = os.fork()
        if child == 0:
            break
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)
    else:
        return
    os.chdir(order["folder"])
    os.environ.update(order["environment"])
    errors = os.open(order["errors"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    quiet = os.open(os.devnull, os.O_RDWR)
    os.dup2(quiet, 0)
    os.dup2(errors, 1)
    os.dup2(errors, 2)
    sys.path[0] = order["folder"]
    sys.argv[:] = ["script.py"]
    run_to_the_end(lambda: runpy.run_path("script.py", run_name="__main__"))


if __name__ == "__main__":
    main()
