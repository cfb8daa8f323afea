"""The job's store, as ranks use it that have the job's secret.

Every process that reaches the store's port can write to it. What ranks write here is sealed
(`intercept/link/value_seal.h`), and what they read counts only if a rank of this attempt has sealed
it under that key. Anything else is as if it were not there: it is counted, and the first is named
in the log.

Threads: any. Errors: what the store raises; `Untrusted` if a key holds nothing but foreign values.
"""

from __future__ import annotations

import secrets
import time
from datetime import timedelta
from typing import Any

from reft import _C

ROUND, AGENT, TABLE, OBJECTS, REPLICAS, NAME = (
    "round", "agent", "table", "objects", "replicas", "name",
)  # fmt: skip

_PATIENCE_SEC = 10.0  # for a rank's own value after a foreign one
_PAUSES_SEC = (0.02, 1.0)  # the first and the longest between two looks

ANY_LENGTH = 1 << 62
"""As many bytes as a value of its kind may have."""


class Untrusted(ValueError):
    """A key holds a value that no rank of this attempt has written there."""


class TrustedStore:
    """A store and the seal of its values.

    Attributes:
        raw: keys that no other attempt sees; for counters and for what brings its own seal.
        seal: of this attempt.
        lasting: of values that the next attempt reads; None if there is no such one.
        secret: name of the secret's file, "" if reft has not made it.
        mesh_key: that the agents' keys are derived from (`mesh.key_of`); reveals nothing of the
            secret.
    """

    def __init__(
        self,
        raw: Any,
        seal: _C.ValueSeal,
        lasting: _C.ValueSeal | None = None,
        secret: str = "",
        mesh_key: bytes = b"",
    ) -> None:
        self.raw, self.seal, self.lasting, self.secret = raw, seal, lasting, secret
        self.mesh_key = mesh_key

    def put(self, kind: str, key: str, publisher: int, payload: str | bytes) -> None:
        """Writes what rank `publisher`, which is this one, has to say."""
        self.raw.set(key, self._sealed(kind, key, publisher, payload))

    def put_new(self, kind: str, key: str, publisher: int, payload: str | bytes) -> None:
        """As `put`, unless this rank has written there."""
        there = self._there(key)
        if there is not None and self.seal.open(kind, key, publisher, there) is not None:
            return
        self.put(kind, key, publisher, payload)

    def first_of(self, kind: str, key: str, publisher: int, payload: str | bytes) -> bytes:
        """Writes if the key is free; returns what the key then holds, of any rank.

        Raises:
            Untrusted: no rank did.
        """
        value = self._sealed(kind, key, publisher, payload)
        there = bytes(self.raw.compare_set(key, "", value))
        return self._opened(kind, key, None, there, ANY_LENGTH)

    def read(
        self,
        kind: str,
        key: str,
        publisher: int | None,
        longest: int = ANY_LENGTH,
        *,
        was_there: bool = False,
    ) -> bytes:
        """What rank `publisher` has written, None: any rank. Waits for it as long as the store
        does, and a short time after a foreign value.

        Args:
            longest: most bytes.
            was_there: it has been waited for. If it is gone, an outsider has removed it, and that
                counts as a foreign value.

        Raises:
            Untrusted: that time is over.
        """
        pause, longest_pause = _PAUSES_SEC
        until: float | None = None
        while True:
            value = self._there(key) if was_there else bytes(self.raw.get(key))
            try:
                return self._opened(kind, key, publisher, value or b"", longest)
            except Untrusted:
                now = time.monotonic()
                until = now + _PATIENCE_SEC if until is None else until
                if now >= until:
                    raise
            time.sleep(pause)
            pause = min(2 * pause, longest_pause)

    def found(self, kind: str, key: str, longest: int) -> bytes | None:
        """What a rank has written, as `read`; None if none has until now."""
        there = self._there(key)
        opened = None if there is None else self.seal.open(kind, key, None, there, longest)
        return None if opened is None else opened[1]

    def has(self, key: str) -> bool:
        """Whether the key is there; its value may be foreign."""
        return bool(self.raw.check([key]))

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        """Waits until the keys are there; RuntimeError if they do not come."""
        self.raw.wait(keys, timeout)

    def _there(self, key: str) -> bytes | None:
        """What a key holds now; None if it is not there. `get` would wait, and one that was there a
        moment ago may be gone: every process that reaches the store can remove it."""
        absent = secrets.token_hex(16)
        value = bytes(self.raw.compare_set(key, absent, absent))
        return None if value == absent.encode() else value

    def _sealed(self, kind: str, key: str, publisher: int, payload: str | bytes) -> bytes:
        data = payload.encode() if isinstance(payload, str) else payload
        return self.seal.seal(kind, key, publisher, data)

    def _opened(
        self, kind: str, key: str, publisher: int | None, value: bytes, longest: int
    ) -> bytes:
        opened = self.seal.open(kind, key, publisher, value, longest)
        if opened is None:
            whom = "a rank" if publisher is None else f"rank {publisher}"
            raise Untrusted(f"the value of {key} in the job's store is not that of {whom}")
        return opened[1]
