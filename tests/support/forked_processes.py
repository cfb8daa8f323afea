"""Processes of `forkpython.py`, for tests that start many which need torch."""

from __future__ import annotations

import json
import math
import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_SERVER = Path(__file__).with_name("forkpython.py")
_MESSAGE_BYTES = 1 << 16
_server: _Server | None = None


class _Server:
    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                ["env", "-u", "PYTHONUNBUFFERED", sys.executable, str(_SERVER)], stdin=theirs,
                env=os.environ | {"OMP_NUM_THREADS": "1"}, start_new_session=True,
            )  # fmt: skip
        self._answer()

    def ask(self, request: dict[str, Any], file: int | None = None) -> dict[str, Any]:
        files = [] if file is None else [file]
        socket.send_fds(self._socket, [json.dumps(request).encode()], files)
        return dict(json.loads(self._answer()))

    def _answer(self) -> bytes:
        message = self._socket.recv(_MESSAGE_BYTES)
        if not message:
            raise RuntimeError("forkpython ended")
        return message


class ForkedProcess:
    """What these tests need of subprocess.Popen."""

    def __init__(
        self, server: _Server, argv: Sequence[str], env: Mapping[str, str], cwd: Path
    ) -> None:
        self._server = server
        self.returncode: int | None = None
        self._said, theirs = os.pipe()
        request = {"argv": [*argv], "env": {**env}, "cwd": str(cwd)}
        self.pid = int(server.ask(request, theirs)["pid"])
        os.close(theirs)

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self._server.ask({"reap": self.pid})["exit"]
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, None]:
        """All that it said, when it has ended."""
        end = math.inf if timeout is None else time.monotonic() + timeout
        said = []
        while piece := self._read(end):
            said.append(piece)
        os.close(self._said)
        while self.poll() is None:
            time.sleep(0.002)
        return b"".join(said).decode(errors="replace"), None

    def _read(self, end: float) -> bytes:
        """What comes next, nothing at the end of all."""
        left = None if end == math.inf else max(0.0, end - time.monotonic())
        if not select.select([self._said], [], [], left)[0]:
            raise subprocess.TimeoutExpired("a forked script", 0.0)
        return os.read(self._said, _MESSAGE_BYTES)


def start(argv: Sequence[str], env: Mapping[str, str], cwd: Path) -> ForkedProcess:
    """Starts a script in a fork; the first call starts the server, which ends with this process."""
    global _server
    if _server is None:
        _server = _Server()
    return ForkedProcess(_server, argv, env, cwd)
