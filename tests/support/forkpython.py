"""Python processes that need not import torch.

A server that imports torch once. Each message on the socket that is its stdin is a request:

    {"argv": script and arguments, "env", "cwd"}, with a file for what it says: {"pid"}
    {"reap": pid}                            {"exit": status of a process, null while it runs}

Each process leads a session of its own. A script begins at the bottom of the stack, as scripts do;
see `forked.py`.
"""

import json
import os
import socket
import sys

import forked

_PR_SET_NAME = 15
_MESSAGE_BYTES = 1 << 20


def become(request, out):
    os.setsid()
    forked.LIBC.prctl(_PR_SET_NAME, b"python")
    forked.set_standard_files(out)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    sys.argv = request["argv"]
    raise forked.Become


def answer(request, files):
    if "reap" in request:
        pid, status = os.waitpid(request["reap"], os.WNOHANG)
        return {"exit": os.waitstatus_to_exitcode(status) if pid else None}
    pid = os.fork()
    if pid == 0:
        become(request, *files)
    os.close(*files)
    return {"pid": pid}


def serve():
    forked.preload()
    with socket.socket(fileno=0) as tests:
        tests.send(b"ready")
        while True:
            message, files, _, _ = socket.recv_fds(tests, _MESSAGE_BYTES, 1)
            if not message:
                os._exit(0)
            tests.send(json.dumps(answer(json.loads(message), files)).encode())


if __name__ == "__main__":
    try:
        serve()
    except forked.Become:
        pass
    code = forked.compiled_script()
    exec(code, sys.modules["__main__"].__dict__)
