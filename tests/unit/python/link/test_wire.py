"""Constants of the wire are the same in C++ and in Python."""

from __future__ import annotations

import re
from pathlib import Path

from reft._link import agent_protocol
from reft._session import notes

ROOT = Path(__file__).resolve().parents[4]
WIRE = (ROOT / "intercept/link/wire.h").read_text()
MESSAGES = (ROOT / "agent/peers/messages.h").read_text()


def constant(source: str, name: str) -> int:
    """Value of `constexpr … name = 64u << 20;`."""
    found = re.search(rf"constexpr \w+ {name} = ([^;]+);", source)
    assert found, name
    number, _, shift = re.sub(r"(?<=\d)u", "", found[1]).partition("<<")
    return int(number, 0) << int(shift or 0)


def snake(name: str) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).upper()


def test_types_of_messages() -> None:
    types = re.search(r"enum class Type : uint16_t \{(.*?)\};", WIRE, re.DOTALL)
    assert types
    native = {snake(name): int(value) for name, value in re.findall(r"k(\w+) = (\d+)", types[1])}
    assert len(native) > 25
    assert native == {name: getattr(agent_protocol, name) for name in native}


def test_frames() -> None:
    assert constant(WIRE, "kMagic") == agent_protocol.MAGIC
    assert constant(WIRE, "kVersion") == agent_protocol.VERSION
    assert constant(WIRE, "kMaxPayload") == agent_protocol.MAX_PAYLOAD
    assert agent_protocol.HEADER.size == 16


def test_notes() -> None:
    assert constant(MESSAGES, "kMaxNotes") == notes._MOST
