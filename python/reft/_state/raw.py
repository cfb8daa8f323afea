"""The bytes of a tensor. `Tensor.numpy` needs NumPy, which torch runs without.

Threads: any. Errors: none.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_AT_ONCE = 1 << 30  # string_at takes an int


def bytes_of(tensor: torch.Tensor) -> bytes:
    """Copies the items of a tensor, in order.

    Args:
        tensor: of any device and dtype, dense, without a lazy conjugate or negative.
    """
    plain = tensor.detach().cpu().contiguous()
    size, address = plain.nbytes, plain.data_ptr()
    if size <= _AT_ONCE:
        return ctypes.string_at(address, size) if size else b""
    return b"".join(
        ctypes.string_at(address + at, min(_AT_ONCE, size - at)) for at in range(0, size, _AT_ONCE)
    )
