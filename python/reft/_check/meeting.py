"""How the nodes of a check exchange messages: values of a store, each with a proof of who may write
them.

A value is JSON behind a MAC of its key's name, its node and the check. Processes that reach the
store's port can write to it; what they write is as if it were not there. The key of the MAC is
derived from the job's secret file (REFT_JOB_SECRET_FILE) if there is one. Otherwise node 0 draws
it and puts it into the store, so that a process that reads the store at that moment can take part.

Threads: one, and those of `links` do not use it. Errors: `Gone` if the store does not answer.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from reft._link import bounded_json

_MOST_BYTES = 4 << 20
_LOOK_SEC = 1.0
_START = "start"


class Gone(RuntimeError):
    """The store, or the node that decides, does not answer."""


class Meeting:
    """One check.

    Args:
        store: keys that no other check uses.
        secret: that all nodes have; None: node 0 hands one out.
        wait_sec: how long a node waits for node 0 at first.
    """

    def __init__(
        self,
        store: Any,
        node: int,
        secret: bytes | None,
        wait_sec: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store, self.node, self._clock = store, node, clock
        if node == 0:
            run, key = secrets.token_hex(16), secret or secrets.token_bytes(32)
            self._set(_START, json.dumps([run, "" if secret else key.hex()]).encode())
        else:
            run, key = self._started(secret, wait_sec)
        self.run = run
        self.key = hmac.new(key, f"reft check {run}".encode(), hashlib.sha256).digest()

    def _started(self, secret: bytes | None, wait_sec: float) -> tuple[str, bytes]:
        value = self._get(_START, self._clock() + wait_sec)
        if value is None:
            raise Gone("node 0 has not begun the check")
        try:
            run, handed = bounded_json.loads(value, limit=1024)
            key = secret or bytes.fromhex(handed)
        except (ValueError, TypeError) as error:
            raise Gone("what node 0 has published is no start of a check") from error
        if not isinstance(run, str) or len(run) != 32 or len(key) < 32:
            raise Gone("node 0 has another secret, or none (REFT_JOB_SECRET_FILE)")
        return run, key

    def put(self, name: str, value: Any) -> None:
        """Publishes what this node has to say."""
        data = json.dumps(value).encode()
        self._set(f"{name}/{self.node}", self._mac(name, self.node, data).encode() + data)

    def get(self, name: str, node: int, until: float) -> Any:
        """What a node has published; None if it has not until then, or it was another one."""
        value = self._get(f"{name}/{node}", until)
        if value is None or not hmac.compare_digest(
            value[:64], self._mac(name, node, value[64:]).encode()
        ):
            return None
        try:
            return bounded_json.loads(value[64:], limit=_MOST_BYTES)
        except ValueError:
            return None

    def _mac(self, name: str, node: int, data: bytes) -> str:
        text = f"{name} {node} ".encode() + data
        return hmac.new(self.key, text, hashlib.sha256).hexdigest()

    def _set(self, key: str, value: bytes) -> None:
        try:
            self._store.set(key, value)
        except Exception as error:
            raise Gone(f"the store does not answer: {error or type(error).__name__}") from error

    def _get(self, key: str, until: float) -> bytes | None:
        while True:
            left = until - self._clock()
            try:
                if self._store.check([key]):
                    return bytes(self._store.get(key))
                if left <= 0:
                    return None
                self._store.wait([key], timedelta(seconds=min(left, _LOOK_SEC)))
            except Exception as error:
                # A wait that ends without the key; or the store is gone, which `check` tells.
                if not self._answers():
                    text = f"the store does not answer: {error or type(error).__name__}"
                    raise Gone(text) from error

    def _answers(self) -> bool:
        try:
            self._store.check([_START])
        except Exception:  # noqa: BLE001  # whatever torch makes of a lost connection
            return False
        return True
