"""The hash of a batch is the same in all processes, and another one for other data."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from reft._continuation.batches import sample_hash

BATCHES: dict[str, Any] = {
    "small": torch.arange(12).reshape(3, 4),
    "large": torch.arange(1 << 16),
    "pair": [torch.ones(4, 8), torch.zeros(4, dtype=torch.bool)],
    "dict": {"tokens": torch.ones(2, 8, dtype=torch.long), "name": "a"},
    "half": torch.ones(40, dtype=torch.bfloat16),
}


@pytest.mark.parametrize("name", BATCHES)
def test_a_copy_has_the_same_hash(name: str) -> None:
    batch = BATCHES[name]
    copied = torch.utils._pytree.tree_map(lambda x: x.clone() if hasattr(x, "clone") else x, batch)
    assert sample_hash(batch) == sample_hash(copied) != 0


def test_other_contents_shapes_and_types_have_other_ones() -> None:
    small = BATCHES["small"]
    others = [small + 1, small.reshape(4, 3), small.float(), BATCHES["large"], BATCHES["large"] + 1]
    assert len({sample_hash(one) for one in [small, *others]}) == 6


def test_it_does_not_depend_on_the_process() -> None:
    assert sample_hash([1, "text"]) == 1, "only tensors count: hashes of strings differ"


def test_what_cannot_be_read_is_left_out() -> None:
    class Broken:
        def keys(self) -> list[str]:
            raise RuntimeError("closed")

    assert sample_hash(Broken()) == 0
    assert sample_hash(torch.eye(3).to_sparse()) != 0
