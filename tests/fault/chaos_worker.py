"""The training that a chaos run disturbs, and the peer thread that disturbs it from inside a rank.

    chaos_worker.py --backend reft|gloo --steps 2000 --plan FILE --out DIR     (under torchrun)

The plan (JSON, of chaos_campaign.py) names acts by rank and step. The peer thread commits those
whose `place` is here: `between` two steps, while the training thread waits; `state`, on the
optimizer's state while forward and backward run; `during` the step, in another thread. For an act
of the campaign's own process, the rank announces the step and continues when it gets an answer.

No act changes a value that training computes with, so the run ends with the same bits whether the
acts happen or not. What only an agent can suffer is left out under gloo.

Writes what train_worker.py writes, r<rank>.acts (one JSON object a line, for each act) and
r<rank>.status (what reft reports of its snapshots).
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import random
import resource
import signal
import socket
import time
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from threading import Condition
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from reft._link import agent_protocol as protocol
from tests.fault.train_worker import Net, RunLog, everything

WIDTH = 384
BATCH = 16
MOST_DESCRIPTORS = 1024
HARMLESS = [
    signal.SIGUSR1, signal.SIGUSR2, signal.SIGCHLD, signal.SIGURG, signal.SIGWINCH, signal.SIGIO,
]  # fmt: skip
_MOST_KEYS = 64  # in one act
GARBAGE = [b"[" * 200_000, b"", b"\xff\xfe", b'["{}", {}]', b"go", b"node-0", bytes(4096)]
READ_KEYS = (
    "agent/", "table/", "objects/", "round/", "identity", "inventory", "match", "verify", "plan/",
)  # fmt: skip
CHILD_SEC = 15.0
TGKILL = 234  # system call of x86-64


class Skipped(Exception):
    """The act could not happen; the text says why."""


def agent_socket(run_dir: Path, job: str, wait_sec: float) -> Path:
    """Where an agent listens; waits for one that is being replaced."""
    path = run_dir / job / "node-0" / "agent.sock"
    deadline = time.monotonic() + wait_sec
    while not path.is_socket():
        if time.monotonic() > deadline:
            raise Skipped(f"no agent listened within {wait_sec:.0f} s")
        time.sleep(0.01)
    return path


class Peer:
    """One thread that acts on this rank, and its record of what happened.

    Args:
        acts: those of this rank with a place here.
    """

    def __init__(
        self,
        acts: list[dict[str, Any]],
        net: nn.Module,
        optimizer: torch.optim.Optimizer,
        out: Path,
    ) -> None:
        self.net, self.optimizer, self.out = net, optimizer, out
        self.rank = int(os.environ["RANK"])
        self._acts: dict[tuple[int, str], list[dict[str, Any]]] = defaultdict(list)
        for act in acts:
            self._acts[act["step"], act["place"]].append(act)
        self._record = open(out / f"r{self.rank}.acts", "ab", buffering=0)  # noqa: SIM115
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="peer")
        self._children: list[int] = []
        self._done = Condition()
        self._step = 0
        self._libc = ctypes.CDLL(None, use_errno=True)

    def start(self, step: int, place: str) -> list[Future[None]]:
        """Hands the acts of this step to the thread."""
        return [self._pool.submit(self._commit, act) for act in self._acts.get((step, place), ())]

    def stepped(self, step: int) -> None:
        with self._done:
            self._step = step
            self._done.notify_all()

    def close(self) -> None:
        self._pool.shutdown()
        self._reap(CHILD_SEC)
        self._record.close()

    def _commit(self, act: dict[str, Any]) -> None:
        try:
            getattr(self, act["kind"])(random.Random(act["seed"]))
            result = "done"
        except Skipped as error:
            result = f"skipped: {error}"
        except Exception as error:
            result = f"failed: {type(error).__name__}: {error}"
        entry = {"rank": self.rank, "step": act["step"], "kind": act["kind"], "result": result}
        self._record.write(json.dumps(entry).encode() + b"\n")

    def _until(self, step: int, most_sec: float) -> None:
        """Waits until training has completed a step."""
        with self._done:
            self._done.wait_for(lambda: self._step >= step, most_sec)

    # -- memory

    def _some(self, rng: random.Random) -> list[torch.Tensor]:
        tensors = [*self.net.parameters(), *self.net.buffers()]
        return rng.sample(tensors, rng.randrange(1, len(tensors) + 1))

    def data_clone(self, rng: random.Random) -> None:
        for tensor in self._some(rng):
            tensor.data = tensor.data.clone()
            self._scribble(tensor.nbytes)

    def set_storage(self, rng: random.Random) -> None:
        """set_() on a parameter itself would part it from the hooks of DistributedDataParallel."""
        for tensor in self._some(rng):
            kept = tensor.detach().clone()
            if isinstance(tensor, nn.Parameter):
                storage = kept.untyped_storage()
                tensor.data = kept.new_empty(0).set_(storage, 0, kept.shape, kept.stride())
            else:
                tensor.set_(kept)
            del kept
            self._scribble(tensor.nbytes)

    def resize_storage(self, rng: random.Random) -> None:
        for tensor in self._some(rng):
            kept = tensor.detach().clone()
            if tensor.is_shared() or not tensor.untyped_storage().resizable():
                tensor.data = kept.clone()
            storage = tensor.untyped_storage()
            storage.resize_(0)
            self._scribble(kept.nbytes)
            storage.resize_(kept.nbytes)
            tensor.data.copy_(kept)

    def share_memory(self, rng: random.Random) -> None:
        for tensor in self._some(rng):
            tensor.data.share_memory_()

    def move_state(self, rng: random.Random) -> None:
        """Other tensors, and other memory of the same tensors, in the optimizer's state."""
        for parameter in self.optimizer.param_groups[0]["params"]:
            state = self.optimizer.state[parameter]
            for name, value in state.items():
                if rng.random() < 0.5:
                    state[name] = value.clone()
                else:
                    value.set_(value.clone())
                self._scribble(value.nbytes)

    move_state_in_step = move_state

    @staticmethod
    def _scribble(count: int) -> None:
        """Takes the memory that was just freed, and leaves no number in it."""
        torch.full((count // 4 + 1,), float("nan"))

    def churn(self, rng: random.Random) -> None:
        for _ in range(40):
            held = [torch.full((rng.randrange(1, 1 << 18),), float("nan")) for _ in range(8)]
            del held[::2]

    def malloc(self, rng: random.Random) -> None:
        blocks = [bytearray(rng.randrange(1, 1 << 20)) for _ in range(64)]
        small = [bytes(rng.randrange(1, 512)) for _ in range(20_000)]
        del blocks[::2], small[::3]
        self._libc.malloc_trim(0)

    # -- processes and signals

    def fork_exit(self, rng: random.Random) -> None:
        if (child := os.fork()) == 0:
            os._exit(0)
        self._children.append(child)
        self._reap(CHILD_SEC)

    def fork_stay(self, rng: random.Random) -> None:
        """A child that holds every descriptor of the rank for a while."""
        self._reap(0)
        sec = rng.uniform(0.1, 0.6)
        if (child := os.fork()) == 0:
            time.sleep(sec)
            os._exit(0)
        self._children.append(child)

    def _reap(self, most_sec: float) -> None:
        """Waits for children that have ended; all of them, if there is time."""
        deadline = time.monotonic() + most_sec
        while True:
            self._children = [pid for pid in self._children if os.waitpid(pid, os.WNOHANG)[0] == 0]
            if not self._children or time.monotonic() >= deadline:
                break
            time.sleep(0.005)
        if self._children and most_sec:
            hanging, self._children = self._children, []
            for pid in hanging:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            raise RuntimeError(f"{len(hanging)} forked children hung for {most_sec:.0f} s")

    def signals(self, rng: random.Random) -> None:
        """To the process, and to each of reft's threads, whose system calls they interrupt."""
        threads = []
        for task in Path("/proc/self/task").iterdir():
            with contextlib.suppress(OSError):
                if (task / "comm").read_text().startswith("reft-"):
                    threads.append(int(task.name))
        for _ in range(200):
            os.kill(os.getpid(), rng.choice(HARMLESS))
            for thread in threads:
                self._libc.syscall(TGKILL, os.getpid(), thread, int(rng.choice(HARMLESS)))

    # -- descriptors

    def descriptors(self, rng: random.Random) -> None:
        for _ in range(5):
            with self._held(60):
                pass

    def all_descriptors(self, rng: random.Random) -> None:
        """None is left while two steps run."""
        step = self._step
        with self._held(MOST_DESCRIPTORS) as held:
            if len(held) >= MOST_DESCRIPTORS:
                raise Skipped("the limit of descriptors has no effect")
            self._until(step + 2, 2.0)

    @staticmethod
    @contextlib.contextmanager
    def _held(count: int) -> Iterator[list[int]]:
        held: list[int] = []
        try:
            with contextlib.suppress(OSError):
                while len(held) < count:
                    held.append(os.memfd_create("held"))
            yield held
        finally:
            for fd in held:
                os.close(fd)

    def send_descriptors(self, rng: random.Random) -> None:
        """To the agent, as a stranger and as a tool, in frames that nobody may send with one."""
        path = agent_socket(Path(os.environ["REFT_RUN_DIR"]), os.environ["REFT_JOB_ID"], 3)
        header = protocol.HEADER.pack(protocol.MAGIC, protocol.VERSION, protocol.HELLO, 400, 0)
        with self._held(4) as fds:
            with socket.socket(socket.AF_UNIX) as stranger, contextlib.suppress(OSError):
                stranger.settimeout(2)
                stranger.connect(str(path))
                socket.send_fds(stranger, [header], fds)
                for _ in range(20):
                    socket.send_fds(stranger, [rng.randbytes(30)], fds)
            with contextlib.suppress(OSError, ValueError):
                with protocol.AgentConnection(path, timeout_sec=2) as tool:
                    for kind in (protocol.VAULT_PUT, protocol.STATUS_REQUEST, rng.randrange(99)):
                        tool.send(kind, {"rank": 0, "bytes": 1 << 40}, fds[0])

    # -- the job's store

    def store_garbage(self, rng: random.Random) -> None:
        """In place of values of reft that are read through the seal, and of those to come."""
        store = dist.TCPStore(
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            is_master=False,
            wait_for_workers=False,
            timeout=timedelta(seconds=5),
        )
        ours = [key for key in store.list_keys() if "/reft/" in f"/{key}"]
        # The shortest: names of earlier garbage are longer, and would double with each act.
        named = sorted(ours, key=lambda key: (len(key), key))
        sealed = [key for key in named if any(part in key for part in READ_KEYS)][:_MOST_KEYS]
        if not sealed:
            raise Skipped("the store has no key of reft")
        for key in sealed:
            store.set(key, rng.choice(GARBAGE))
            store.set(f"{key}{rng.randrange(10)}", rng.choice(GARBAGE))


class Announcer:
    """Tells the campaign which step this rank has completed, and waits until it may continue."""

    def __init__(self, path: Path, steps: set[int]) -> None:
        self._steps = steps
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(str(path))

    def stepped(self, step: int) -> None:
        if step in self._steps:
            self._socket.sendall(f"{os.environ['RANK']} {step}\n".encode())
            if not self._socket.recv(1):
                raise RuntimeError("the campaign is gone")


class Commits:
    """How snapshots went, as this rank sees it after each step."""

    def __init__(self, enabled: bool) -> None:
        self._enabled = enabled
        self._newest = self._newest_at = 0
        self.seen, self.longest_gap = 0, 0

    def look(self, step: int) -> None:
        if not self._enabled:
            return
        import reft

        committed = int(reft.status().get("committed_step", 0))
        if committed > self._newest:
            self.seen, self._newest, self._newest_at = self.seen + 1, committed, step
        self.longest_gap = max(self.longest_gap, step - self._newest_at)

    def at_end(self) -> dict[str, Any]:
        if not self._enabled:
            return {}
        import reft

        final = reft.snapshot_now(10)
        return {
            **reft.status(),
            "final": final,
            "seen": self.seen,
            "longest_gap": self.longest_gap,
        }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--plan", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    rank = int(os.environ["RANK"])
    plan = json.loads(args.plan.read_text())
    acts = [act for act in plan["acts"] if act["rank"] == rank]
    pauses: dict[int, float] = dict(plan["pauses"])
    torch.set_num_threads(1)
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (MOST_DESCRIPTORS, hard))
    for number in HARMLESS:
        signal.signal(number, lambda *_: None)
    log = RunLog(args.out)
    announcer = Announcer(Path(plan["socket"]), {s for r, s in plan["announce"] if r == rank})
    dist.init_process_group(args.backend)

    torch.manual_seed(5)
    net = Net(True, WIDTH)
    model = DistributedDataParallel(net, broadcast_buffers=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 40, gamma=0.97)
    peer = Peer([act for act in acts if act["place"] != "outside"], net, optimizer, args.out)
    commits = Commits(args.backend == "reft")
    torch.manual_seed(100 + rank)
    np.random.seed(200 + rank)
    random.seed(300 + rank)
    losses: list[str] = []
    for step in range(1, args.steps + 1):
        peer.start(step, "during")
        moved = peer.start(step, "state")
        x = torch.randn(BATCH, 32)
        loss = nn.functional.cross_entropy(model(x), x[:, :4].argmax(dim=1))
        loss.backward()
        for future in moved:
            future.result()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        losses.append(loss.item().hex())
        log.line(step, loss)
        peer.stepped(step)
        announcer.stepped(step)
        for future in peer.start(step, "between"):
            future.result()
        commits.look(step)
        time.sleep(pauses.get(step, 0))
    peer.close()
    status = commits.at_end()
    (args.out / f"r{rank}.status").write_text(json.dumps(status))
    final = everything(model, [optimizer], [scheduler], losses)
    (args.out / f"r{rank}.final").write_text(final)
    print(f"rank {rank} ends with {final}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
