"""What nodes measure, what can be at fault, and what a check decides.

Threads: any. Errors: `ValueError` for JSON that no node of this version writes.
"""

from __future__ import annotations

import ipaddress
import math
import re
from dataclasses import asdict, dataclass
from typing import Any

MOST_NODES = 4096
MOST_RAILS = 16
_MOST_PARTS = 256
_MOST_CHARS = 200
_HOST = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")

NODE, NIC, LINK = "node", "nic", "link"
SLOW, LOSSY, WRONG, DEAD = "slow", "lossy", "wrong", "dead"


@dataclass(frozen=True, order=True)
class Unit:
    """What can be at fault.

    Attributes:
        kind: node, nic (the card of one node in one rail: the card, its port, its cable) or link
            (all between the cards of two nodes).
        node: the lower one of a link.
        rail: of a nic or link; 0 for a node.
        peer: the higher node of a link; -1 otherwise.
    """

    kind: str
    node: int
    rail: int = 0
    peer: int = -1


def node_unit(node: int) -> Unit:
    return Unit(NODE, node)


def nic_unit(node: int, rail: int) -> Unit:
    return Unit(NIC, node, rail)


def link_unit(a: int, b: int, rail: int) -> Unit:
    return Unit(LINK, min(a, b), rail, max(a, b))


@dataclass(frozen=True)
class Part:
    """One measurement inside a node.

    Attributes:
        name: for people.
        kind: parts of one kind are compared with each other, over all nodes; it contains the model
            of the device.
        value: higher is better; 0 if there is none.
        unit: of `value`.
        fault: why the hardware is at fault by this measurement alone; "" if it is not.
        skipped: why nothing was measured; "" if something was.
    """

    name: str
    kind: str
    value: float
    unit: str
    fault: str = ""
    skipped: str = ""


@dataclass(frozen=True)
class Port:
    """The card of a node in one rail, as the node sees it.

    Attributes:
        address, port: where it takes connections.
        device: name of the network device; "" if unknown.
        carrier: 1, 0, or -1 if unknown.
        mbits: nominal speed; 0 if unknown.
    """

    address: str
    port: int
    device: str = ""
    carrier: int = -1
    mbits: int = 0


@dataclass(frozen=True)
class Report:
    """What a node has measured alone.

    Attributes:
        host: its name, as Slurm knows it if there is Slurm.
        loopback: Gbit/s over TCP within the node; 0 if unknown.
    """

    node: int
    host: str
    parts: tuple[Part, ...]
    ports: tuple[Port, ...]
    loopback: float = 0.0


@dataclass(frozen=True)
class Pair:
    """One measurement between two nodes in one rail; `a` < `b`.

    Attributes:
        reached: whether the two could talk at all.
        gbits: Gbit/s of the slower direction; 0 if nothing arrived.
        rtt_us: median round trip.
        lost: segments that TCP sent again, of `sent`, in the direction that lost more.
        is_corrupt: bytes arrived that were not sent.
        is_shared: node `a` or `b` had another measurement at the same time, on purpose.
    """

    a: int
    b: int
    rail: int
    reached: bool
    gbits: float = 0.0
    rtt_us: float = 0.0
    lost: int = 0
    sent: int = 0
    is_corrupt: bool = False
    is_shared: bool = False


@dataclass(frozen=True)
class Fault:
    """A unit that is at fault.

    Attributes:
        how: slow, lossy, wrong (data differs, or a test fails) or dead.
        why: the evidence, for people.
    """

    unit: Unit
    how: str
    why: str


@dataclass(frozen=True)
class Verdict:
    """What the check has decided.

    Attributes:
        faults: at fault whatever else is.
        between: questions that the evidence leaves open: each a tuple of alternatives, of which one
            holds, the one with the fewest faults first.
        exclude: nodes without which the job has none of the faults of nodes and cards; each is at
            fault, or cut off, under every alternative.
        hidden: units that could not be judged because all that is known of them went through a
            faulty one.
        notes: what the user should know besides.
        untested: links that were not measured.
    """

    faults: tuple[Fault, ...] = ()
    between: tuple[tuple[tuple[Fault, ...], ...], ...] = ()
    exclude: tuple[int, ...] = ()
    hidden: tuple[Unit, ...] = ()
    notes: tuple[str, ...] = ()
    untested: int = 0

    @property
    def is_good(self) -> bool:
        return not self.faults and not self.between


# -- as JSON


def dump_report(report: Report) -> dict[str, Any]:
    return asdict(report)


def parse_report(value: Any, node: int) -> Report:
    """What node `node` has published.

    Raises:
        ValueError: it is not that.
    """
    found = _fields(value, "node", "host", "parts", "ports", "loopback")
    if found["node"] != node or type(found["node"]) is not int:
        raise ValueError("report of another node")
    host = found["host"]
    if not isinstance(host, str) or not _HOST.fullmatch(host):
        raise ValueError("report without a host name")
    parts = tuple(_part(one) for one in _list(found["parts"], _MOST_PARTS))
    ports = tuple(_port(one) for one in _list(found["ports"], MOST_RAILS))
    return Report(node, host, parts, ports, _amount(found["loopback"]))


def host_name(text: str) -> str:
    """The name as reports may contain it."""
    return re.sub(r"[^A-Za-z0-9._-]", "-", text)[:128].lstrip("._-") or "unknown"


def dump_pair(pair: Pair) -> list[Any]:
    return [*asdict(pair).values()]


def parse_pair(value: Any) -> Pair:
    """What one end has seen of a pair.

    Raises:
        ValueError: it is not that.
    """
    kinds = [int, int, int, bool, float, float, int, int, bool, bool]
    values = _list(value, len(kinds))
    if [type(one) for one in values] != kinds:
        raise ValueError("not a pair")
    numbers = [one for one in values if type(one) is not bool]
    if any(not math.isfinite(one) or one < 0 for one in numbers):
        raise ValueError("a pair of impossible values")
    return Pair(*values)


def dump_verdict(verdict: Verdict) -> dict[str, Any]:
    return asdict(verdict)


def parse_verdict(value: Any) -> Verdict:
    """What node 0 has decided.

    Raises:
        ValueError: it is not that.
    """
    found = _fields(value, "faults", "between", "exclude", "hidden", "notes", "untested")
    between = tuple(
        tuple(tuple(_fault(one) for one in _list(choice)) for choice in _list(question))
        for question in _list(found["between"])
    )
    return Verdict(
        tuple(_fault(one) for one in _list(found["faults"])),
        between,
        tuple(_count(one) for one in _list(found["exclude"])),
        tuple(_unit(one) for one in _list(found["hidden"])),
        tuple(_text(one) for one in _list(found["notes"])),
        _count(found["untested"]),
    )


def _part(value: Any) -> Part:
    found = _fields(value, "name", "kind", "value", "unit", "fault", "skipped")
    texts = [_text(found[name]) for name in ("name", "kind", "unit", "fault", "skipped")]
    name, kind, unit, fault, skipped = texts
    return Part(name, kind, _amount(found["value"]), unit, fault, skipped)


def _port(value: Any) -> Port:
    found = _fields(value, "address", "port", "device", "carrier", "mbits")
    address = str(ipaddress.ip_address(_text(found["address"])))
    port, carrier, mbits = _count(found["port"]), found["carrier"], _count(found["mbits"])
    if not 0 < port < 1 << 16 or type(carrier) is not int or carrier not in (-1, 0, 1):
        raise ValueError("not a port")
    return Port(address, port, _text(found["device"]), carrier, mbits)


def _fault(value: Any) -> Fault:
    found = _fields(value, "unit", "how", "why")
    if found["how"] not in (SLOW, LOSSY, WRONG, DEAD):
        raise ValueError("not a fault")
    return Fault(_unit(found["unit"]), found["how"], _text(found["why"]))


def _unit(value: Any) -> Unit:
    found = _fields(value, "kind", "node", "rail", "peer")
    if found["kind"] not in (NODE, NIC, LINK):
        raise ValueError("not a unit")
    peer = found["peer"] if found["peer"] == -1 else _count(found["peer"])
    return Unit(found["kind"], _count(found["node"]), _count(found["rail"]), peer)


def _fields(value: Any, *names: str) -> dict[str, Any]:
    if not isinstance(value, dict) or set(value) != set(names):
        raise ValueError(f"not an object of {', '.join(names)}")
    return value


def _list(value: Any, most: int = 1 << 16) -> list[Any]:
    if not isinstance(value, list) or len(value) > most:
        raise ValueError("not a list, or too long")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError("not a text")
    return value[:_MOST_CHARS]


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 31:
        raise ValueError("not a count")
    return value


def _amount(value: Any) -> float:
    if type(value) not in (int, float) or not math.isfinite(value) or value < 0:
        raise ValueError("not an amount")
    return float(value)
