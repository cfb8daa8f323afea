"""Text that every machine with Python has: the sources of the standard library, as bytes."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch
from torch.utils.data import Dataset

VOCABULARY = 256


def corpus() -> torch.Tensor:
    """All modules of the standard library, concatenated in the order of their paths.

    Returns:
        uint8 tensor of shape (bytes,), about 30 MB.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    files = (path for path in root.rglob("*.py") if not {"site-packages", "dist-packages"} & set(path.parts))
    text = b"".join(path.read_bytes() for path in sorted(files))
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


class StandardLibrary(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Windows of `context` bytes that do not overlap, each with the same window moved on by one
    byte.

    Args:
        context: bytes in a window.
        samples: windows in the data set, evenly spread over the text; 0: as many as there are.
    """

    def __init__(self, context: int, samples: int = 0) -> None:
        self.text = corpus()
        self.context = context
        windows = (len(self.text) - 1) // context
        self.samples = min(samples, windows) or windows
        self.stride = windows // self.samples * context

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        start = index * self.stride
        window = self.text[start : start + self.context + 1].long()
        return window[:-1], window[1:]
