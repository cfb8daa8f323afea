"""One hash over all that training changed: weights, buffers and the states of optimizers, schedulers, averages."""

import hashlib

import torch
from torch.utils._pytree import tree_leaves


def digest(*parts):
    """Hash of modules, optimizers, schedulers, scalers and tensors, bit for bit."""
    hasher = hashlib.sha256()
    for part in parts:
        for leaf in tree_leaves(part.state_dict() if hasattr(part, "state_dict") else part):
            if hasattr(leaf, "to_local"):
                leaf = leaf.to_local()
            if isinstance(leaf, torch.Tensor):
                hasher.update(leaf.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
            elif isinstance(leaf, (int, float, str, bool, type(None))):
                hasher.update(repr(leaf).encode())
    return hasher.hexdigest()[:32]
