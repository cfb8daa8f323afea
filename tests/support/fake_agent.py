"""The socket of an agent that a test plays."""

from __future__ import annotations

import socket
import threading
from abc import ABC, abstractmethod
from pathlib import Path


class AgentSocket(ABC):
    """Listens where the command line looks for the agent of `job`, and has each peer `talk`."""

    def __init__(self, run_dir: Path, job: str = "demo") -> None:
        directory = run_dir / job / "node-0"
        directory.mkdir(mode=0o700, parents=True)
        run_dir.chmod(0o700)
        self.path = directory / "agent.sock"
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(self.path))
        self._listener.listen()
        threading.Thread(target=self._serve, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self.talk, args=(connection,), daemon=True).start()

    @abstractmethod
    def talk(self, connection: socket.socket) -> None:
        """Answers one peer, in a thread of its own."""
