"""torchrun's way of starting and restarting ranks, without four imports of torch for each start.

A server that imports torch once. Each line on stdin is a request
`{"script", "argv", "env", "nproc", "max_restarts", "run_id", "log"}`; it answers `{"pid":
launcher}` at once and `{"exit": status}` at the end. A launcher hosts a TCPStore that stays over
restarts, forks the ranks with torchrun's variables, and when one fails ends the others (SIGTERM,
then SIGKILL) and starts all again.

A rank begins at the bottom of the stack, as a script does; see `forked.py`.
"""

import json
import os
import signal
import sys
import time

import forked

_PR_SET_PDEATHSIG = 1


def host_store(out):
    import torch.distributed as dist

    forked.LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # tests kill launchers
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    os.write(out, str(store.port).encode())
    os.close(out)
    while True:
        signal.pause()


def start_rank(request, rank, attempt, port):
    pid = os.fork()
    if pid:
        return pid
    os.environ.update(request["env"])
    os.environ.update(
        {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(request["nproc"]),
            "LOCAL_WORLD_SIZE": str(request["nproc"]),
            "GROUP_RANK": "0",
            "GROUP_WORLD_SIZE": "1",
            "ROLE_RANK": str(rank),
            "ROLE_WORLD_SIZE": str(request["nproc"]),
            "ROLE_NAME": "default",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "TORCHELASTIC_RESTART_COUNT": str(attempt),
            "TORCHELASTIC_MAX_RESTARTS": str(request["max_restarts"]),
            "TORCHELASTIC_RUN_ID": request["run_id"],
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }
    )
    sys.argv = [request["script"], *request["argv"]]
    raise forked.Become


def end(pids):
    """Ends ranks as torchrun does."""
    for pid in pids:
        os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + 5
    while pids:
        pid, _ = os.waitpid(-1, os.WNOHANG)
        pids.discard(pid)
        if not pid:
            if time.monotonic() > deadline:
                for rest in pids:
                    os.kill(rest, signal.SIGKILL)
            time.sleep(0.005)


def launch(request):
    os.setsid()
    forked.set_standard_files(forked.log_file(request["log"]))
    read, write = os.pipe()
    store = os.fork()
    if store == 0:
        host_store(write)
    os.close(write)
    port = int(os.read(read, 16))
    os.close(read)
    code = 1
    for attempt in range(request["max_restarts"] + 1):
        pids = {start_rank(request, rank, attempt, port) for rank in range(request["nproc"])}
        failed = False
        while pids and not failed:
            pid, status = os.wait()
            pids.discard(pid)
            failed = status != 0
            if failed:
                print(
                    f"forkrun: attempt {attempt}: pid {pid} ended with {os.waitstatus_to_exitcode(status)}",
                    file=sys.stderr,
                    flush=True,
                )
        end(pids)
        if not failed:
            code = 0
            break
    os.kill(store, signal.SIGKILL)
    os._exit(code)


def serve():
    forked.preload()
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        pid = os.fork()
        if pid == 0:
            launch(request)
        print(json.dumps({"pid": pid}), flush=True)
        _, status = os.waitpid(pid, 0)
        print(json.dumps({"exit": os.waitstatus_to_exitcode(status)}), flush=True)
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    try:
        serve()
    except forked.Become:
        pass
    code = forked.compiled_script()
    exec(code, sys.modules["__main__"].__dict__)
