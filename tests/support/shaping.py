"""Slow, lossy and dead network cards and links between the namespaces of `nodes.Network`.

Every card has a class queue (htb) whose default class has the rate of a healthy card. A fault is
another class, and a filter that sends packets there: all of a card or those to one address (u32),
or a random share of them to a class that drops (a program of classic BPF; netem would do the same,
and fewer kernels have it).
"""

from __future__ import annotations

import os
import subprocess

from tests.support.nodes import Network, why_no_namespaces

HEALTHY_MBIT = 400
_DROPS = "1:66"
_RANDOM = 4294963256  # SKF_AD_OFF + SKF_AD_RANDOM


def why_no_shaping() -> str:
    """Why cards cannot be slowed or made lossy here; "" if they can."""
    if why := why_no_namespaces():
        return why
    name = f"reft-shape-{os.getpid()}"
    try:
        subprocess.run(["ip", "netns", "add", name], check=True, capture_output=True)
        card = Card(name, "lo")
        card.lose(0.5)
        card.slow(10, "10.231.7.1")
    except (OSError, subprocess.CalledProcessError) as error:
        said = getattr(error, "stderr", b"") or str(error).encode()
        return f"tc cannot shape traffic: {said.decode(errors='replace').strip()[:200]}"
    finally:
        subprocess.run(["ip", "netns", "del", name], capture_output=True)
    return ""


class Card:
    """The outgoing side of a network device in a namespace."""

    def __init__(self, namespace: str, device: str = "eth0") -> None:
        self._namespace, self._device, self._slowed = namespace, device, 0
        self._tc("qdisc", "add", "root", "handle", "1:", "htb", "default", "10")
        self._class("1:10", HEALTHY_MBIT)
        self._class(_DROPS, HEALTHY_MBIT)
        self._tc("qdisc", "add", "parent", _DROPS, "handle", "66:", "blackhole")

    def slow(self, mbit: int, to: str = "") -> None:
        """A lower rate, of all packets or of those to an address."""
        self._slowed += 1
        self._class(f"1:2{self._slowed}", mbit)
        self._match(to, f"1:2{self._slowed}")

    def lose(self, share: float) -> None:
        """Drops a share of the packets."""
        most = int(share * (1 << 32))
        program = f"4,32 0 0 {_RANDOM},53 1 0 {most},6 0 0 4294967295,6 0 0 0"
        self._filter("1", "bpf", "bytecode", program, "flowid", _DROPS)

    def cut(self, to: str) -> None:
        """Drops all packets to an address."""
        self._match(to, _DROPS)

    def _match(self, to: str, target: str) -> None:
        self._filter("2", "u32", "match", "ip", "dst", f"{to}/32" if to else "0.0.0.0/0", "flowid", target)

    def _class(self, name: str, mbit: int) -> None:
        self._tc("class", "add", "parent", "1:", "classid", name, "htb", "rate", f"{mbit}mbit",
                 "quantum", "60000")  # fmt: skip

    def _filter(self, priority: str, *words: str) -> None:
        self._tc("filter", "add", "parent", "1:", "protocol", "ip", "prio", priority, *words)

    def _tc(self, what: str, verb: str, *words: str) -> None:
        command = ["ip", "netns", "exec", self._namespace, "tc", what, verb, "dev", self._device, *words]
        subprocess.run(command, check=True, capture_output=True)


def cards(network: Network, nodes: int) -> list[Card]:
    """The card of each node."""
    return [Card(network.namespace(node).rpartition("/")[2]) for node in range(nodes)]
