"""Constants of the wire and of the notes are the same in C++ and in Python."""

from __future__ import annotations

import ast
import operator
import re
import struct
import tomllib
from pathlib import Path

import reft
from reft._link import agent_protocol
from reft._session import notes

ROOT = Path(__file__).resolve().parents[4]
OPERATIONS = {ast.LShift: operator.lshift, ast.Mult: operator.mul, ast.Add: operator.add}
SIZES = {"uint8_t": "B", "uint16_t": "H", "uint32_t": "I", "int64_t": "q", "uint64_t": "Q"}


def text(path: str) -> str:
    return (ROOT / path).read_text()


def value(expression: str) -> int:
    """Of a constant expression of C++."""

    def of(node: ast.expr) -> int:
        if isinstance(node, ast.BinOp):
            return int(OPERATIONS[type(node.op)](of(node.left), of(node.right)))
        assert isinstance(node, ast.Constant), expression
        return int(node.value)

    plain = re.sub(r"\b(0x[0-9A-Fa-f]+|\d+)[uUlL]+\b", r"\1", expression)
    return of(ast.parse(plain, mode="eval").body)


def constants(source: str) -> dict[str, int]:
    found = re.findall(r"^(?:inline )?constexpr u?int\w* (k\w+) = ([^;]+);", source, re.MULTILINE)
    found += re.findall(r"^constexpr size_t (k\w+) = ([^;]+);", source, re.MULTILINE)
    return {name: value(expression) for name, expression in found}


def struct_format(source: str, name: str) -> str:
    """Of a struct of fixed-size integers, as module struct writes it."""
    body = re.search(rf"struct {name} {{(.*?)}};", source, re.DOTALL)
    assert body, name
    fields = re.findall(r"^\s*(\w+) \w+(?:\[(\d+)\])?;", body[1], re.MULTILINE)
    return "<" + "".join(f"{count}x" if count else SIZES[kind] for kind, count in fields)


def test_frames() -> None:
    wire = text("intercept/link/wire.h")
    found = constants(wire)
    assert found["kMagic"] == agent_protocol.MAGIC
    assert found["kVersion"] == agent_protocol.VERSION
    assert found["kMaxPayload"] == agent_protocol.MAX_PAYLOAD
    assert struct_format(wire, "Header") == agent_protocol.HEADER.format
    assert struct_format(wire, "Ballot") == agent_protocol.BALLOT.format


def test_message_types() -> None:
    body = re.search(
        r"enum class Type : uint16_t {(.*?)}", text("intercept/link/wire.h"), re.DOTALL
    )
    assert body
    types = {
        re.sub(r"(?<!^)(?=[A-Z])", "_", name).upper(): int(number)
        for name, number in re.findall(r"k(\w+) = (\d+),", body[1])
    }
    assert len(types) > 20
    assert types == {name: getattr(agent_protocol, name, None) for name in types}


def test_limits_of_notes() -> None:
    assert constants(text("agent/peers/messages.h"))["kMaxNotes"] == notes._MOST


def test_vault_magic_and_version() -> None:
    """tests/integration/test_agent.py writes vaults by hand."""
    found = constants(text("snapshot/vault/vault_format.h"))
    by_hand = text("tests/integration/test_agent.py")
    version = re.search(r"^VAULT_VERSION = (\d+)", by_hand, re.MULTILINE)
    assert version and int(version[1]) == found["kVaultVersion"]
    assert f"0x{found['kVaultMagic']:X}" in by_hand
    assert struct.pack("<Q", found["kVaultMagic"]) == b"REFTVLT1"


def test_version_of_the_package() -> None:
    """pyproject.toml declares it; nothing else does."""
    declared = tomllib.loads(text("pyproject.toml"))["project"]["version"]
    assert reft.__version__ == declared
    written = [
        path
        for folder in (
            "agent",
            "intercept",
            "snapshot",
            "hang_detect",
            "c10d_backend",
            "python/reft",
            "cmake",
        )
        for path in (ROOT / folder).rglob("*")
        if path.suffix in {".h", ".cc", ".py", ".txt", ".cmake"}
        and f'"{declared}"' in path.read_text()
    ]
    assert not written
