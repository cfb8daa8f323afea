"""torchrun for jobs of several nodes on one machine, without an import of torch for each process.

A server that imports torch once. Each line on stdin is a request:

    {"run": torchrun's arguments, "env", "log", "netns", "host"}   starts a launcher: {"pid"}
    {"reap": pid}                                                  waits for one: {"exit": status}

A launcher is torchrun itself: its rendezvous, its restarts. It is a node of its own: it enters the
network namespace (a path, "" for none) and has a host name of its own ("" for this host's). Only
the way in which it starts a rank differs: a helper that it forked when it had no thread yet forks
the rank, which the launcher then adopts.

A rank begins at the bottom of the stack, as a script does; see `forked.py`.
"""

import ctypes
import json
import os
import platform
import signal
import socket
import subprocess
import sys
import time
import traceback

import forked

_PR_SET_PDEATHSIG, _PR_SET_NAME, _PR_SET_CHILD_SUBREAPER = 1, 15, 36
_CLONE_NEWUTS, _CLONE_NEWNET = 0x04000000, 0x40000000


class Rank:
    """What torchrun needs of subprocess.Popen."""

    def __init__(self, pid):
        self.pid, self.returncode = pid, None

    def poll(self):
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout=None):
        end = None if timeout is None else time.monotonic() + timeout
        while self.poll() is None:
            if end is not None and time.monotonic() > end:
                raise subprocess.TimeoutExpired("a rank", timeout)
            time.sleep(0.01)
        return self.returncode


def succeed(returned):
    if returned != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def start_rank(request, lines):
    """The pid of a new rank, whose parent is the launcher."""
    read, write = os.pipe()
    between = os.fork()
    if between:
        os.waitpid(between, 0)
        os.close(write)
        pid = int(os.read(read, 16))
        os.close(read)
        return pid
    between = os.getpid()
    pid = os.fork()
    if pid:
        os.write(write, str(pid).encode())
        os._exit(0)
    while os.getppid() == between:
        time.sleep(0.001)
    forked.LIBC.prctl(_PR_SET_NAME, b"python")
    os.setsid()
    lines.close()
    os.close(read)
    os.close(write)
    os.environ.clear()
    os.environ.update(request["env"])
    sys.argv = request["argv"]
    raise forked.Become


def serve_launcher(ours):
    forked.LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    forked.LIBC.prctl(_PR_SET_NAME, b"node-helper")  # by which nodes.py knows it
    lines = ours.makefile("rw")
    ours.close()
    for line in lines:
        lines.write(f"{start_rank(json.loads(line), lines)}\n")
        lines.flush()
    os._exit(0)


def launch(request):
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

    os.setsid()
    forked.set_standard_files(forked.log_file(request["log"]))
    if request["netns"]:
        namespace = os.open(request["netns"], os.O_RDONLY)
        succeed(forked.LIBC.setns(namespace, _CLONE_NEWNET))
        os.close(namespace)
    if request["host"]:
        succeed(forked.LIBC.unshare(_CLONE_NEWUTS))
        socket.sethostname(request["host"])
        platform._uname_cache = None
    os.environ.clear()
    os.environ.update(request["env"])
    succeed(forked.LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1))
    theirs, ours = socket.socketpair()
    if os.fork() == 0:
        theirs.close()
        serve_launcher(ours)
    ours.close()
    lines = theirs.makefile("rw")

    def popen(self, args, env):
        script = [word for word in args[1:] if word != "-u"]  # args[0] is Python
        lines.write(json.dumps({"env": env, "argv": script}) + "\n")
        lines.flush()
        return Rank(int(lines.readline()))

    subprocess_handler.SubprocessHandler._popen = popen
    code = 0
    try:
        run.main(request["run"])
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
        code = 1
    os._exit(code)


def serve():
    forked.preload()
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        if "reap" in request:
            _, status = os.waitpid(request["reap"], 0)
            print(json.dumps({"exit": os.waitstatus_to_exitcode(status)}), flush=True)
            continue
        pid = os.fork()
        if pid == 0:
            try:
                launch(request)
            except Exception:
                traceback.print_exc()
                os._exit(1)
        print(json.dumps({"pid": pid}), flush=True)
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    try:
        serve()
    except forked.Become:
        pass
    code = forked.compiled_script()
    exec(code, sys.modules["__main__"].__dict__)
