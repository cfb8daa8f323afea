"""What servers share that import torch once and fork the scripts of tests.

A forked script begins at the bottom of the stack, as a script does: `Become` unwinds the fork to
the end of the server's file, which runs `compiled_script()` as `__main__`.
"""

import ctypes
import gc
import os
import sys
import types

LIBC = ctypes.CDLL(None, use_errno=True)


class Become(BaseException):
    """Unwinds a forked child to the bottom of the stack. `sys.argv` and `os.environ` are the
    script's by then."""


def preload():
    """Imports what scripts import, and prepares the process to be forked."""
    import numpy  # noqa: F401
    import torch._dynamo  # noqa: F401  (optimizers import it)
    import torch.distributed.fsdp  # noqa: F401
    import torch.distributed.run  # noqa: F401
    import torch.nn.parallel  # noqa: F401
    import torch.optim  # noqa: F401
    import torch.utils.data  # noqa: F401

    # Called after what ranks register and before torch's destructors, which take 0.3 s each time.
    LIBC.on_exit(LIBC._exit, None)
    gc.freeze()  # a collection in a child would copy every page that holds an object


def compiled_script():
    """The code of `sys.argv[0]`, with `sys` and `__main__` as Python sets them for a
    script."""
    # Not line by line: a line that begins with a newline would be written in two parts, and other
    # ranks come in between.
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
    for folder in reversed(os.environ.get("PYTHONPATH", "").split(os.pathsep)):
        if folder and folder not in sys.path:
            sys.path.insert(1, folder)
    sys.modules["__main__"] = types.ModuleType("__main__")
    sys.modules["__main__"].__file__ = sys.argv[0]
    with open(sys.argv[0]) as script:
        return compile(script.read(), sys.argv[0], "exec")


def log_file(path):
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)


def set_standard_files(out):
    """Stdin is empty; stdout and stderr are `out`, a descriptor, which is closed."""
    null = os.open(os.devnull, os.O_RDONLY)
    for fd, wanted in ((null, 0), (out, 1), (out, 2)):
        os.dup2(fd, wanted)
    os.close(out)
    os.close(null)

