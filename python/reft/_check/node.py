"""One node of a check, from its own measurements to the verdict.

Node 0 decides: it waits for the reports of the others, publishes which pairs measure in each round
(`course`), waits for the results of those, and publishes the verdict. The other nodes do what it
publishes. All waits have a limit, so a node that dies or hangs delays the check and is named; only
node 0 is needed (`Gone`).

Threads: those of `links` and `local`, and one for each pair of this node in a round (at the end
that answers: for each rail of it). Errors: `Gone`; `Unusable` if an option does not fit this node.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import os
import platform
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from reft._check import evidence, links, local
from reft._check.course import AGAIN, FIRST, SHARED, Course
from reft._check.evidence import Pair, Port, Report, Verdict
from reft._check.meeting import Gone, Meeting
from reft._check.plan import FAULTS

_SLACK_SEC = 10.0  # between nodes that began a round together
_GOODBYE_SEC = 15.0
_OVERLAP = 0.8  # of the time of measurements that are to be made at one time
_SIOCGIFADDR = 0x8915
_SIOCETHTOOL, _GSET, _GLINK = 0x8946, 0x1, 0xA
_AMOUNTS = {FIRST: links.FIRST, AGAIN: links.AGAIN, SHARED: links.SHARED}


class Unusable(ValueError):
    """An option does not fit this node."""


@dataclass(frozen=True)
class Options:
    """Attributes:
    cards: names of network devices, or numeric addresses: one for each rail.
    directory: where the disk is measured.
    wait_sec: how long node 0 waits for the other nodes' reports after its own.
    """

    node: int
    nodes: int
    cards: tuple[str, ...]
    directory: Path
    quick: bool
    wait_sec: float
    secret: bytes | None = None


@dataclass(frozen=True)
class Outcome:
    """What the check has found.

    Attributes:
        hosts: names of the nodes that have published a report.
        own: report of this node.
        rounds: of measurements between nodes.
    """

    verdict: Verdict
    hosts: Mapping[int, str]
    own: Report
    rounds: int


_Ends = dict[tuple[int, int, int], links.End]  # by opener, other and rail
Measure = Callable[[Path, bool], tuple[tuple[evidence.Part, ...], float]]


def alone(options: Options, measure: Measure = local.measure) -> Outcome:
    """The check of this node by itself."""
    report = _report(options, (), measure)
    course = Course(1, {0: Report(0, report.host, report.parts, (), report.loopback)})
    return Outcome(course.verdict(), {0: report.host}, report, 0)


def together(options: Options, store: Any, measure: Measure = local.measure) -> Outcome:
    """The check of all nodes.

    Raises:
        Gone: node 0, or the store, does not answer.
        Unusable: a card does not exist here.
    """
    doors = [_door(card) for card in options.cards]
    try:
        # A long measurement must not delay `start`, which the others wait for.
        meeting = Meeting(store, options.node, options.secret, options.wait_sec)
        report = _report(options, doors, measure)
        meeting.put("report", evidence.dump_report(report))
        node = _Node(options, meeting, doors, report)
        return node.decide() if options.node == 0 else node.follow()
    finally:
        for door in doors:
            door.close()


def _report(options: Options, doors: Any, measure: Measure) -> Report:
    parts, loopback = measure(options.directory, options.quick)
    ports = tuple(_port(door) for door in doors)
    return Report(options.node, host_name(), parts, ports, loopback)


def host_name() -> str:
    """As Slurm calls this node, if it does."""
    return evidence.host_name(os.environ.get("SLURMD_NODENAME") or platform.node())


class _Node:
    def __init__(
        self, options: Options, meeting: Meeting, doors: list[links.Door], report: Report
    ) -> None:
        self._options, self._meeting, self._doors, self._own = options, meeting, doors, report
        self._reports: dict[int, Report] = {}

    # -- node 0

    def decide(self) -> Outcome:
        options, meeting = self._options, self._meeting
        until = time.monotonic() + options.wait_sec
        self._reports[0] = self._own
        for node in range(1, options.nodes):
            with contextlib.suppress(ValueError):
                value = meeting.get("report", node, until)
                if value is not None:
                    self._reports[node] = evidence.parse_report(value, node)
        rails = max(len(report.ports) for report in self._reports.values())
        course = Course(options.nodes, self._reports, FAULTS + 1 if options.quick else None)
        meeting.put("roster", [evidence.dump_report(one) for one in self._reports.values()])
        number, live = 0, set(self._reports)
        while (one := course.next()) is not None:
            number += 1
            pairs = [_opened(pair, one.phase, one.pairs) for pair in one.pairs]
            meeting.put(f"go/{number}", {"phase": one.phase, "pairs": pairs})
            ends = {0: _parse_ends(self._take_part(number, one.phase, pairs)) or {}}
            until = time.monotonic() + _AMOUNTS[one.phase].longest_sec * rails + _SLACK_SEC
            for node in sorted(live - {0}):
                found = _parse_ends(meeting.get(f"ends/{number}", node, until))
                if found is not None:
                    ends[node] = found
            course.record(self._merged(pairs, one.phase, ends), live - set(ends))
            live &= set(ends)
        verdict = course.verdict()
        hosts = {node: report.host for node, report in self._reports.items()}
        meeting.put(
            f"go/{number + 1}", {"verdict": evidence.dump_verdict(verdict), "rounds": number}
        )
        until = time.monotonic() + _GOODBYE_SEC
        for node in sorted(live - {0}):
            meeting.get("bye", node, until)  # the store may end with this process
        return Outcome(verdict, hosts, self._own, number)

    def _merged(self, pairs: list[list[int]], phase: str, ends: Mapping[int, _Ends]) -> list[Pair]:
        """What was measured between nodes that have published what they saw."""
        measured = []
        for opener, other in pairs:
            if not {opener, other} <= set(ends):
                continue
            a, b = sorted((opener, other))
            for rail in range(min(len(self._reports[node].ports) for node in (a, b))):
                one = ends[opener].get((opener, other, rail), links.End(False))
                two = ends[other].get((opener, other, rail), links.End(False))
                measured.append(links.merged(a, b, rail, one, two, phase == SHARED))
        return measured

    # -- the others

    def follow(self) -> Outcome:
        meeting, options = self._meeting, self._options
        roster = meeting.get("roster", 0, time.monotonic() + 2 * options.wait_sec + 600)
        if not isinstance(roster, list) or len(roster) > options.nodes:
            raise Gone("node 0 does not go on with the check")
        for value in roster:
            node = value.get("node") if isinstance(value, dict) else None
            if type(node) is int and 0 <= node < options.nodes:
                with contextlib.suppress(ValueError):
                    self._reports[node] = evidence.parse_report(value, node)
        rails = max((len(one.ports) for one in self._reports.values()), default=0)
        longest = max(amount.longest_sec for amount in _AMOUNTS.values()) * max(1, rails)
        number = 0
        while True:
            number += 1
            message = meeting.get(
                f"go/{number}", 0, time.monotonic() + 2 * longest + 2 * _SLACK_SEC
            )
            if not isinstance(message, dict):
                raise Gone("node 0 does not go on with the check")
            if "verdict" in message:
                break
            phase, pairs = _parse_round(message, options.nodes)
            meeting.put(f"ends/{number}", self._take_part(number, phase, pairs))
        try:
            verdict = evidence.parse_verdict(message["verdict"])
        except ValueError as error:
            raise Gone("what node 0 has published is no verdict") from error
        meeting.put("bye", 1)
        hosts = {node: report.host for node, report in self._reports.items()}
        return Outcome(verdict, hosts, self._own, number - 1)

    def _take_part(self, number: int, phase: str, pairs: list[list[int]]) -> list[Any]:
        """What this node sees in a round: lists of opener, other, rail and the fields of `End`. A
        node without a pair answers, too, so that one that dies is missed at once."""
        me = self._options.node
        seen: list[list[Any]] = []
        threads = []
        opened = sum(opener == me for opener, _ in pairs)
        shared = [links.Together(opened) for _ in self._doors] if phase == SHARED and opened else []
        for opener, other in pairs:
            if me not in (opener, other):
                continue
            peer = self._reports.get(other if me == opener else opener)
            rails = range(min(len(self._doors), len(peer.ports) if peer else 0))
            measure = partial(self._measure, seen, number, phase, opener, other, shared)
            # The opener measures one rail after the other; the other end awaits it in all of them,
            # because only the opener knows when it has given one up.
            parts = [rails] if me == opener else [[rail] for rail in rails]
            threads += [
                threading.Thread(target=measure, args=(part,), name="reft-check-pair")
                for part in parts
            ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        # Measurements that were not made at one time show nothing.
        apart = {rail for rail, one in enumerate(shared) if one.overlap < _OVERLAP}
        return [one for one in seen if one[2] not in apart]

    def _measure(
        self,
        seen: list[list[Any]],
        number: int,
        phase: str,
        opener: int,
        other: int,
        shared: list[links.Together],
        rails: Iterable[int],
    ) -> None:
        amount = _AMOUNTS[phase]
        for rail in rails:
            context = f"{self._meeting.run} {number} {opener} {other} {rail}".encode()
            key, door = links.Key(self._meeting.key, context), self._doors[rail]
            if self._options.node == opener:
                port = self._reports[other].ports[rail]
                together = shared[rail] if shared else None
                end = links.open_to(port.address, port.port, door, key, amount, together)
            else:
                end = door.answer(key, amount, rail * amount.longest_sec)
            seen.append([opener, other, rail, end.reached, end.gbits, end.rtt_us, end.lost,
                         end.sent, end.is_corrupt])  # fmt: skip


# -- messages


def _opened(pair: tuple[int, int], phase: str, pairs: tuple[tuple[int, int], ...]) -> list[int]:
    """Who connects, first: with a node in common, that one."""
    a, b = pair
    if phase == SHARED and sum(b in one for one in pairs) > 1:
        a, b = b, a
    return [a, b]


def _parse_round(message: dict[str, Any], nodes: int) -> tuple[str, list[list[int]]]:
    phase, pairs = message.get("phase"), message.get("pairs")
    if phase not in _AMOUNTS or not isinstance(pairs, list) or len(pairs) > nodes:
        raise Gone("what node 0 has published is no round")
    for pair in pairs:
        numbers = isinstance(pair, list) and [type(node) for node in pair] == [int, int]
        if not numbers or pair[0] == pair[1] or not all(0 <= node < nodes for node in pair):
            raise Gone("what node 0 has published is no round")
    return phase, pairs


def _parse_ends(value: Any) -> _Ends | None:
    """None if that is not what a node publishes."""
    if not isinstance(value, list) or len(value) > evidence.MOST_RAILS * 2:
        return None
    found = {}
    for one in value:
        try:
            pair = evidence.parse_pair([*one, False])
        except (ValueError, TypeError):
            return None
        end = links.End(
            pair.reached, pair.gbits, pair.rtt_us, pair.lost, pair.sent, pair.is_corrupt
        )
        found[pair.a, pair.b, pair.rail] = end
    return found


# -- network cards


def _door(card: str) -> links.Door:
    names = {name for _, name in socket.if_nameindex()}
    if card in names:
        address, device = _address_of(card), card
        if not address:
            raise Unusable(f"network device {card} has no IPv4 address here")
    else:
        address = card
        device = next((name for name in sorted(names) if _address_of(name) == card), "")
    try:
        return links.Door(address, device)
    except (OSError, ValueError) as error:
        raise Unusable(f"{card} is neither a network device nor an address of this node") from error


def _address_of(device: str) -> str:
    """IPv4 address of a network device; "" if it has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        request = struct.pack("256s", device.encode()[:15])
        try:
            answer = fcntl.ioctl(probe, _SIOCGIFADDR, request)
        except OSError:
            return ""
    return socket.inet_ntoa(answer[20:24])


def _port(door: links.Door) -> Port:
    carrier, mbits = -1, 0
    if door.device and door.device != "lo":
        if link := _ethtool(door.device, _GLINK, 8):
            carrier = int(link[4] != 0)
        if found := _ethtool(door.device, _GSET, 44):
            low, high = (
                struct.unpack_from("=H", found, 12)[0],
                struct.unpack_from("=H", found, 28)[0],
            )
            mbits = 0 if low == 0xFFFF else low | high << 16
    return Port(door.address, door.port, door.device, carrier, mbits)


def _ethtool(device: str, command: int, size: int) -> bytes:
    """What the driver says; b"" if nothing. (/sys may be that of another network namespace.)"""
    data = array.array("B", struct.pack("=I", command) + bytes(size - 4))
    request = struct.pack("16sP", device.encode()[:15], data.buffer_info()[0])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            fcntl.ioctl(probe, _SIOCETHTOOL, request)
        except OSError:
            return b""
    return data.tobytes()
