"""Reads torch's own headers: no virtual function of the installed version may be missing from the wrapper."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

ROOT = Path(__file__).parents[3]
HEADERS = Path(torch.__file__).parent / "include/torch/csrc/distributed/c10d"


def virtuals(header: str, first: str, last: str) -> set[str]:
    text = re.sub(r"//[^\n]*", "", (HEADERS / header).read_text())
    text = text[text.index(first) : text.index(last)]
    options = text.find("struct TORCH_API Options")
    if options >= 0:  # a class of its own
        text = text[:options] + text[text.index("explicit Backend(int rank", options) :]
    return {
        re.findall(r"([A-Za-z_]+)\s*\(", piece)[0] if "::function<" not in piece.split("(")[0] else ""
        for piece in re.findall(r"virtual\s+([^;{]*?\()", text)
    }


@pytest.mark.parametrize(
    ("header", "first", "last", "ours"),
    [
        ("Backend.hpp", "class TORCH_API Backend", "void init();", "backend.h"),
        ("Work.hpp", "class TORCH_API Work", "struct TORCH_API WorkInfo", "work.h"),
    ],
)
def test_every_virtual_is_declared(header: str, first: str, last: str, ours: str) -> None:
    declared = (ROOT / "c10d_backend" / ours).read_text()
    names = virtuals(header, first, last) - {""}
    assert len(names) > 10
    missing = sorted(name for name in names if not re.search(rf"\b{name}\(", declared))
    assert missing == []
