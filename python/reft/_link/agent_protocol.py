"""Client of the agent's socket in pure Python, for the command line and for tests.

The frames are those of `intercept/link/wire.h`; the table of messages is in ARCHITECTURE.md.

The client trusts a listener only if the kernel reports the own user for it, and checks that before
it sends or reads. Answers have a size, a depth and a time, all of them limited.

Threads: a connection belongs to one. Errors: see `AgentConnection`.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

from reft import __version__
from reft._link import bounded_json

MAGIC = 0x57544652
VERSION = 3
MAX_PAYLOAD = 64 << 20
HEADER = struct.Struct("<IHHII")
BALLOT = struct.Struct("<qQQQBBB5x")
_PEER = struct.Struct("3i")  # ucred: pid, uid, gid
_MOST_FDS = 4  # that wait for their message

HELLO, WELCOME, ERROR = 1, 2, 3
VAULT_PUT, VAULT_ACK, VAULT_LIST, VAULT_INVENTORY, VAULT_GET, VAULT_FD = 10, 11, 12, 13, 14, 15
VOTE, OUTCOME, NODE_VOTE, JOB_OUTCOME = 20, 21, 22, 23
STACK_REQUEST, STACK_REPLY, VERDICT, ABORT, NOTES = 40, 41, 42, 43, 44
GATHER, GATHERED, EVIDENCE_REQUEST, EVIDENCE = 45, 46, 47, 48
STATUS_REQUEST, STATUS, METRICS_REQUEST, METRICS, STACKS_REQUEST, STACKS = 50, 51, 52, 53, 54, 55
BYE, LAST_WORDS, WORDS_HEARD = 60, 61, 62
MESH_OPEN, MESH_AT, MESH_KEEP, MESH_FETCH, MESH_FETCHED = 70, 71, 72, 73, 74

# What the first text of a note on a resume is, and the `resume_verdict` of one that is not exact.
RESUME_NOTE = "resume:"
ASSUMED_NOTE = "taken for unchanged:"
RESUME_DIFFERS = 2

_BALLOTS = (VOTE, OUTCOME, NODE_VOTE, JOB_OUTCOME)


def find_agents(run_dir: Path) -> Iterator[Path]:
    """Sockets under `run_dir`; one may be left by an agent that died."""
    yield from sorted(path for path in run_dir.glob("*/node-*/agent.sock") if path.is_socket())


class AgentConnection:
    """One connection to one agent; a context manager.

    Args:
        path: of the socket.
        hello: fields that replace those of a tool's hello, as for a rank. None: a tool. An empty
            `{}` is a tool too.
        timeout_sec: for connecting and the greeting as a whole, and for each later answer as a
            whole, however it arrives.

    Raises:
        OSError: no process listens, another user's does (`PermissionError`), or no answer in time
            (`TimeoutError`).
        ValueError: what answers is not an agent, or it refuses; the message says why.
    """

    def __init__(
        self, path: Path | str, hello: dict[str, Any] | None = None, timeout_sec: float = 10.0
    ) -> None:
        path = Path(path)
        self._buffer = b""
        self._fds: list[int] = []
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(timeout_sec)
        self._timeout_sec = timeout_sec
        deadline = time.monotonic() + timeout_sec
        try:
            self._connect(path)
            self._check_peer(path)
            greeting: dict[str, Any] = {
                "role": "tool",
                "protocol": VERSION,
                "version": __version__,
                "job": path.parent.parent.name,
                "node": int(path.parent.name.removeprefix("node-") or 0),
                "pid": os.getpid(),
            }
            self.send(HELLO, {**greeting, **(hello or {})})
            kind, answer, _ = self._receive(deadline)
            if kind == ERROR:
                raise ValueError(
                    f"the agent refuses: {answer.get('what')} {answer.get('hint', '')}".strip()
                )
            if kind != WELCOME:
                raise ValueError(f"{path} answered hello with message {kind}")
            self.welcome = answer
        except BaseException:
            self.close()
            raise

    def _connect(self, path: Path) -> None:
        # sun_path holds 107 bytes; a longer path is reached through its directory.
        if len(os.fsencode(path)) <= 107:
            self._socket.connect(str(path))
            return
        directory = os.open(path.parent, os.O_PATH | os.O_CLOEXEC)
        try:
            self._socket.connect(f"/proc/self/fd/{directory}/{path.name}")
        finally:
            os.close(directory)

    def _check_peer(self, path: Path) -> None:
        data = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
        _, uid, _ = _PEER.unpack(data)
        if uid != os.geteuid():
            raise PermissionError(f"{path} belongs to user {uid}, and this is user {os.geteuid()}")

    def __enter__(self) -> AgentConnection:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Closes the socket and descriptors that nobody took."""
        self._socket.close()
        while self._fds:
            os.close(self._fds.pop())

    def send(self, kind: int, payload: dict[str, Any] | bytes, fd: int | None = None) -> None:
        """Sends one frame; `fd` rides on its first byte and stays the caller's."""
        self._socket.settimeout(self._timeout_sec)
        body = payload if isinstance(payload, bytes) else json.dumps(payload).encode()
        frame = HEADER.pack(MAGIC, VERSION, kind, len(body), 0) + body
        if fd is not None:
            sent = socket.send_fds(self._socket, [frame], [fd])
            frame = frame[sent:]
        # An empty send to a peer that has refused the frame would raise before its answer is read.
        if frame:
            self._socket.sendall(frame)

    def vote(
        self, step: int, incarnation: int, sealed: bool, digest: int = 0, proposal: int = 0
    ) -> None:
        """Votes on a snapshot, as a rank."""
        self.send(VOTE, BALLOT.pack(step, incarnation, digest, 0, int(sealed), proposal, 0))

    def receive(self) -> tuple[int, dict[str, Any], int | None]:
        """Waits for the next frame.

        Returns:
            Its type, its payload (ballots as `{step, incarnation, digest, yes, proposal}`,
            metrics as `{text}`), and a descriptor if one came with it; the caller closes it.
        """
        return self._receive(time.monotonic() + self._timeout_sec)

    def _receive(self, deadline: float) -> tuple[int, dict[str, Any], int | None]:
        header = self._take(HEADER.size, deadline)
        magic, version, kind, size, _ = HEADER.unpack(header)
        if magic != MAGIC or version != VERSION or size > MAX_PAYLOAD:
            raise ValueError("what answers is not an agent of this version of reft")
        body = self._take(size, deadline)
        fd = self._fds.pop(0) if kind in (VAULT_PUT, VAULT_FD) and self._fds else None
        if kind in _BALLOTS:
            if size != BALLOT.size:
                raise ValueError(f"a ballot of {size} bytes")
            step, incarnation, digest, _, yes, proposal, _ = BALLOT.unpack(body)
            ballot = {
                "step": step,
                "incarnation": incarnation,
                "digest": digest,
                "yes": bool(yes),
                "proposal": proposal,
            }
            return kind, ballot, fd
        if kind == METRICS:
            return kind, {"text": body.decode()}, fd
        value = bounded_json.loads(body or b"{}", limit=MAX_PAYLOAD)
        if not isinstance(value, dict):
            raise ValueError(f"message {kind} is not a JSON object")
        return kind, value, fd

    def request(
        self, kind: int, payload: dict[str, Any] | None = None
    ) -> tuple[int, dict[str, Any], int | None]:
        """Sends a request and waits for the next frame, which may be ERROR; see `receive`."""
        self.send(kind, payload or {})
        return self.receive()

    def _take(self, size: int, deadline: float) -> bytes:
        parts = [self._buffer]
        have = len(self._buffer)
        while have < size:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError("no whole answer in time")
            self._socket.settimeout(left)
            data, fds, _, _ = socket.recv_fds(
                self._socket, 1 << 16, _MOST_FDS, socket.MSG_CMSG_CLOEXEC
            )
            self._fds += fds
            if len(self._fds) > _MOST_FDS:
                raise ValueError("more descriptors than answers")
            if not data:
                raise ConnectionError("the agent closed the connection")
            parts.append(data)
            have += len(data)
        whole = b"".join(parts)
        self._buffer = whole[size:]
        return whole[:size]
