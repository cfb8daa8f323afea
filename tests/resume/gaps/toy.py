"""What the scripts of this folder share: a toy model under DistributedDataParallel and its training step."""

import hashlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves


def begin():
    """Joins the job, with the same seed on all ranks. Returns this rank's number."""
    dist.init_process_group("reft")
    torch.manual_seed(3)
    return dist.get_rank()


def parts(*more):
    """A model, with `more` layers after its own, and its optimizer."""
    model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), *more))
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def train(model, optimizer, x):
    """One training step. Returns the loss."""
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    return loss.item()


def say(rank, step, *values):
    """A line of one step."""
    print(f"r{rank} step {step}", *values, flush=True)


def end(rank, *values):
    """The last line: a hash of all parts, bit for bit."""
    hasher = hashlib.sha256()
    for leaf in tree_leaves([v.state_dict() if hasattr(v, "state_dict") else v for v in values]):
        data = leaf.detach().contiguous().reshape(-1).view(torch.uint8).tolist() if torch.is_tensor(leaf) else repr(leaf)
        hasher.update(str(data).encode())
    print(f"r{rank} final {hasher.hexdigest()[:32]}", flush=True)
    dist.destroy_process_group()
