"""One measurement between two nodes over TCP: round trip, lost segments, rate in both directions,
and whether what arrives is what was sent.

The *opener* connects, from its card to that of the other end. Each end first proves to the other
one that it has the key of the check, for this measurement (`_context`); what is read before is of
fixed length. Then:

    pings     the opener sends 64 bytes, which come back; the round trip is the median time
    bursts    8 writes of 1200 bytes, which come back; 100 times, or until the time is over. Few
              bytes are in flight, so segments that TCP sends again are lost by the path, not by a
              queue that this traffic fills. Those that arrived twice (D-SACK) were not lost.
    blocks    the opener sends for a fixed time, then asks the other end to; the receiver counts
              and compares

Each end returns what it has seen (`End`), `merged` makes one `Pair` of them. Every read and write
ends at a deadline. A stream that stalls counts with what had arrived until then.

Threads: one per measurement; `Door` has one that accepts, and one per connection that has proved
nothing yet (at most 16). Errors: none; a peer that does not answer, or answers wrongly, is not
reached.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import queue
import secrets
import socket
import statistics
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from reft._check.evidence import Pair

_MAGIC = b"RFTC\x01"
_NONCE, _MAC = 16, 32
_PING, _PINGS = 64, 20
_WRITE, _WRITES = 1200, 8
BLOCK = 128 << 10
_MORE, _LAST = b"\x01", b"\x00"
_READY = b"\x01"

CONNECT_SEC = 4.0
_TRIES = 4
_PROVE_SEC = 4.0
_TOGETHER_SEC = 2.0
_STALL_SEC = 3.0  # beyond the time of sending
_MOST_UNPROVED = 16
_NOTSENT_LOWAT = getattr(socket, "TCP_NOTSENT_LOWAT", 25)
_INFO_BYTES = 256
_TOTAL_RETRANS, _DATA_SEGS_OUT, _DSACK_DUPS = 100, 156, 216  # offsets in struct tcp_info


@dataclass(frozen=True)
class Amount:
    """How much a measurement does.

    Attributes:
        bursts: at most.
        probe_sec: for pings and bursts together.
        send_sec: for blocks in one direction.
    """

    bursts: int
    probe_sec: float
    send_sec: float

    @property
    def longest_sec(self) -> float:
        """After so long the measurement is over, whatever the peer does."""
        return CONNECT_SEC + _PROVE_SEC + self.probe_sec + 2 * self.send_sec + 4 * _STALL_SEC


FIRST = Amount(100, 2.0, 0.25)
AGAIN = Amount(300, 4.0, 0.75)
SHARED = Amount(0, 1.0, 1.0)


class Together:
    """Has the measurements that one node opens at one time send, and receive, in the same time.

    Args:
        count: of measurements.
    """

    def __init__(self, count: int) -> None:
        self._barrier = threading.Barrier(count)
        self._spans: dict[str, list[tuple[float, float]]] = {}
        self._count = count

    def wait(self) -> None:
        """Raises OSError if the others do not come."""
        try:
            self._barrier.wait(_TOGETHER_SEC)
        except threading.BrokenBarrierError as error:
            raise OSError("the other measurements did not come so far") from error

    def add(self, what: str, began: float, ended: float) -> None:
        self._spans.setdefault(what, []).append((began, ended))

    @property
    def overlap(self) -> float:
        """Share of the time that all of them had in common; 0 if one has failed."""
        if len(self._spans) < 2 or any(len(one) < self._count for one in self._spans.values()):
            return 0.0
        return min(
            (min(end for _, end in spans) - max(begin for begin, _ in spans))
            / max(1e-9, max(end for _, end in spans) - min(begin for begin, _ in spans))
            for spans in self._spans.values()
        )


@dataclass(frozen=True)
class Key:
    """What both ends must have.

    Attributes:
        value: 32 bytes.
        context: of this measurement, so that no proof is good for another one.
    """

    value: bytes
    context: bytes

    def proof(self, role: bytes, mine: bytes, other: bytes) -> bytes:
        text = b"reft check " + role + b"\0" + self.context + b"\0" + mine + other
        return hmac.new(self.value, text, hashlib.sha256).digest()

    def block(self) -> bytes:
        """The bytes that both ends send."""
        return hashlib.shake_256(b"reft check block" + self.value).digest(BLOCK)


@dataclass(frozen=True)
class End:
    """What one end has seen.

    Attributes:
        reached: whether the peer has proved itself.
        gbits: of what this end has received.
        rtt_us: 0 at the end that did not open.
        lost, sent: segments of this end.
    """

    reached: bool
    gbits: float = 0.0
    rtt_us: float = 0.0
    lost: int = 0
    sent: int = 0
    is_corrupt: bool = False


def merged(a: int, b: int, rail: int, one: End, other: End, is_shared: bool) -> Pair:
    """What both ends have seen."""
    if not (one.reached and other.reached):
        return Pair(a, b, rail, False, is_shared=is_shared)
    worst = max((one, other), key=lambda end: end.lost / max(1, end.sent))
    return Pair(
        a, b, rail, True, min(one.gbits, other.gbits), max(one.rtt_us, other.rtt_us),
        worst.lost, worst.sent, one.is_corrupt or other.is_corrupt, is_shared,
    )  # fmt: skip


class Door:
    """Takes connections at one address.

    Args:
        address: numeric.
        device: to which its connections are bound; "" for any.
    """

    def __init__(self, address: str, device: str = "") -> None:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._socket = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        _bind(self._socket, address, device)
        self._socket.listen(_MOST_UNPROVED)
        self.address, self.device = address, device
        self.port = int(self._socket.getsockname()[1])

    def answer(
        self,
        key: Key,
        amount: Amount,
        later_sec: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> End:
        """Waits for the peer that has the key, and measures with it.

        Args:
            later_sec: so much later than this end the peer may begin.
        """
        proved: queue.Queue[socket.socket] = queue.Queue()
        stop = threading.Event()
        unproved = threading.Semaphore(_MOST_UNPROVED)
        accepter = threading.Thread(
            target=self._accept, args=(key, proved, stop, unproved), name="reft-check-door"
        )
        accepter.start()
        try:
            peer = proved.get(timeout=later_sec + CONNECT_SEC + _PROVE_SEC)
        except queue.Empty:
            return End(False)
        finally:
            stop.set()
            accepter.join()
        with peer:
            return _Talk(peer, key, amount, clock).answer()

    def _accept(
        self,
        key: Key,
        proved: queue.Queue[socket.socket],
        stop: threading.Event,
        unproved: threading.Semaphore,
    ) -> None:
        self._socket.settimeout(0.05)
        while not stop.is_set():
            try:
                peer, _ = self._socket.accept()
            except OSError:
                continue
            if not unproved.acquire(blocking=False):
                peer.close()
                continue
            threading.Thread(
                target=self._prove, args=(peer, key, proved, unproved), daemon=True,
                name="reft-check-proof",
            ).start()  # fmt: skip

    @staticmethod
    def _prove(
        peer: socket.socket,
        key: Key,
        proved: queue.Queue[socket.socket],
        unproved: threading.Semaphore,
    ) -> None:
        try:
            until = time.monotonic() + _PROVE_SEC
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            hello = _read(peer, len(_MAGIC) + _NONCE, until, time.monotonic)
            theirs, mine = hello[len(_MAGIC) :], secrets.token_bytes(_NONCE)
            if not hello.startswith(_MAGIC):
                raise OSError("another protocol")
            _write(peer, mine + key.proof(b"answers", theirs, mine), until, time.monotonic)
            proof = _read(peer, _MAC, until, time.monotonic)
            if not hmac.compare_digest(proof, key.proof(b"opens", theirs, mine)):
                raise OSError("another key")
            _write(peer, _READY, until, time.monotonic)
        except OSError:
            peer.close()
        else:
            proved.put(peer)
        finally:
            unproved.release()

    def close(self) -> None:
        self._socket.close()


def open_to(
    address: str,
    port: int,
    own: Door,
    key: Key,
    amount: Amount,
    together: Together | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> End:
    """Connects from the card of `own` to a peer's door, and measures with it, at the same time as
    the other measurements of `together`."""
    try:
        with _connected(address, port, own) as peer:
            until = clock() + _PROVE_SEC
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            mine = secrets.token_bytes(_NONCE)
            _write(peer, _MAGIC + mine, until, clock)
            answer = _read(peer, _NONCE + _MAC, until, clock)
            theirs = answer[:_NONCE]
            if not hmac.compare_digest(answer[_NONCE:], key.proof(b"answers", mine, theirs)):
                return End(False)
            _write(peer, key.proof(b"opens", mine, theirs), until, clock)
            if _read(peer, 1, until, clock) != _READY:
                return End(False)
            return _Talk(peer, key, amount, clock, together).open()
    except OSError:
        return End(False)


def _connected(address: str, port: int, own: Door) -> socket.socket:
    """Several tries, because the kernel sends a lost first segment again only after 1, 3 and 7
    seconds."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    for last in [False] * (_TRIES - 1) + [True]:
        peer = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            _bind(peer, own.address, own.device)
            peer.settimeout(CONNECT_SEC / _TRIES)
            peer.connect((address, port))
            return peer
        except TimeoutError:
            peer.close()
            if last:
                raise
        except OSError:
            peer.close()
            raise
    raise AssertionError


def within(address: str, seconds: float) -> float:
    """Gbit/s over TCP from this host to itself; 0 if it fails."""
    door = Door(address)
    try:
        key, amount = Key(secrets.token_bytes(32), b"within"), Amount(0, 1.0, seconds)
        ends: list[End] = []
        answering = threading.Thread(target=lambda: ends.append(door.answer(key, amount)))
        answering.start()
        mine = open_to(address, door.port, door, key, amount)
        answering.join()
        pair = merged(0, 1, 0, mine, ends[0], False)
        return 0.0 if pair.is_corrupt else pair.gbits
    finally:
        door.close()


class _Talk:
    """A connection whose ends have proved themselves."""

    def __init__(
        self,
        peer: socket.socket,
        key: Key,
        amount: Amount,
        clock: Callable[[], float],
        together: Together | None = None,
    ) -> None:
        self._together = together
        self._peer, self._block, self._amount, self._clock = peer, key.block(), amount, clock
        self._rtt_us, self._gbits, self._is_corrupt = 0.0, 0.0, False
        self._lost = self._sent = 0
        with contextlib.suppress(OSError):
            peer.setsockopt(socket.IPPROTO_TCP, _NOTSENT_LOWAT, BLOCK)

    def open(self) -> End:
        return self._end(self._ask, self._wait, self._send, self._wait, self._want, self._receive)

    def answer(self) -> End:
        return self._end(self._echo, self._receive, self._await, self._send)

    def _end(self, *steps: Callable[[], None]) -> End:
        with contextlib.suppress(OSError):
            for step in steps:
                step()
        return End(True, self._gbits, self._rtt_us, self._lost, self._sent, self._is_corrupt)

    def _wait(self) -> None:
        if self._together:
            self._together.wait()

    def _want(self) -> None:
        _write(self._peer, _READY, self._clock() + _STALL_SEC, self._clock)

    def _await(self) -> None:
        _read(self._peer, 1, self._clock() + _STALL_SEC, self._clock)

    def _ask(self) -> None:
        until = self._clock() + self._amount.probe_sec
        stall = until + _STALL_SEC
        times = []
        for _ in range(_PINGS):
            began = self._clock()
            _write(self._peer, _MORE * _PING, stall, self._clock)
            _read(self._peer, _PING, stall, self._clock)
            times.append(self._clock() - began)
            if self._clock() > until:
                break
        self._rtt_us = 1e6 * statistics.median(times)
        _write(self._peer, _LAST * _PING, stall, self._clock)
        before = _segments(self._peer)
        try:
            left = self._amount.bursts
            while left and self._clock() < until:
                self._burst(_MORE, stall)
                _read(self._peer, _WRITE * _WRITES, stall, self._clock)
                left -= 1
            self._burst(_LAST, stall)
        finally:
            self._count(before)

    def _echo(self) -> None:
        stall = self._clock() + self._amount.probe_sec + _STALL_SEC
        while (ping := _read(self._peer, _PING, stall, self._clock))[:1] == _MORE:
            _write(self._peer, ping, stall, self._clock)
        before = _segments(self._peer)
        try:
            while _read(self._peer, _WRITE * _WRITES, stall, self._clock)[:1] == _MORE:
                self._burst(_MORE, stall)
        finally:
            self._count(before)

    def _burst(self, mark: bytes, until: float) -> None:
        for _ in range(_WRITES):
            _write(self._peer, mark * _WRITE, until, self._clock)

    def _count(self, before: tuple[int, int]) -> None:
        lost, sent = _segments(self._peer)
        self._lost, self._sent = max(0, lost - before[0]), max(0, sent - before[1])

    def _send(self) -> None:
        began = self._clock()
        until = began + self._amount.send_sec
        stall = until + _STALL_SEC
        while self._clock() < until:
            _write(self._peer, _MORE + self._block, stall, self._clock)
        _write(self._peer, _LAST, stall, self._clock)
        if self._together:
            self._together.add("sent", began, self._clock())

    def _receive(self) -> None:
        stall = self._clock() + self._amount.send_sec + _STALL_SEC
        buffer = bytearray(BLOCK)
        count, began, view = 0, 0.0, memoryview(buffer)
        try:
            # What follows the last mark is not a block.
            while _read(self._peer, 1, stall, self._clock) == _MORE:
                began = began or self._clock()
                filled = 0
                while filled < BLOCK:
                    filled += (got := _read_into(self._peer, view[filled:], stall, self._clock))
                    count += got
                if buffer != self._block:
                    self._is_corrupt = True
        finally:
            if began and count:
                # A stream that stalled lasts until now.
                ended = self._clock()
                self._gbits = count * 8e-9 / max(1e-6, ended - began)
                if self._together:
                    self._together.add("received", began, ended)


def _bind(socket_: socket.socket, address: str, device: str) -> None:
    if device and device != "lo":
        with contextlib.suppress(OSError):  # old kernels want root for it
            socket_.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, device.encode())
    socket_.bind((address, 0))


def _write(peer: socket.socket, data: bytes, until: float, clock: Callable[[], float]) -> None:
    _limit(peer, until, clock)
    peer.sendall(data)


def _read(peer: socket.socket, count: int, until: float, clock: Callable[[], float]) -> bytes:
    buffer = bytearray(count)
    view, filled = memoryview(buffer), 0
    while filled < count:
        filled += _read_into(peer, view[filled:], until, clock)
    return bytes(buffer)


def _read_into(
    peer: socket.socket, view: memoryview, until: float, clock: Callable[[], float]
) -> int:
    _limit(peer, until, clock)
    got = peer.recv_into(view)
    if got == 0:
        raise ConnectionError("the peer has closed")
    return got


def _limit(peer: socket.socket, until: float, clock: Callable[[], float]) -> None:
    left = until - clock()
    if left <= 0:
        raise TimeoutError
    peer.settimeout(left)


def _segments(peer: socket.socket) -> tuple[int, int]:
    """Segments that the path has lost, and all that were sent; zeros if the kernel is too old."""
    try:
        info = peer.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
    except OSError:
        return 0, 0
    if len(info) < _DSACK_DUPS + 4:
        return 0, 0

    def at(offset: int) -> int:
        return int(struct.unpack_from("=I", info, offset)[0])

    return max(0, at(_TOTAL_RETRANS) - at(_DSACK_DUPS)), at(_DATA_SEGS_OUT)
