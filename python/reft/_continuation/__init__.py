"""Puts a restarted, unchanged script back where a captured loop stood.

`capture` and `plan` are called at the same program point, inside the optimizer's step post-hook,
in the process that will die and in the one that takes its place. `install` makes DataLoader
iterators remember their origin and comes before both.

Where things are:

- `continuation`: the calls above, and what a process remembers of its first program point.
- `frames`, `bytecode`, `calls`: frames, their locals and value stack.
- `capture_walk`, `restore_walk`: the walks through objects; `nodes`: what they leave and read.
- `kinds`: one class for each kind of object, with its capture and its restore; `kinds.table`
  chooses one by an object's class. A DataLoader's position is put back in `kinds.loaders`.
- `handles`: numbers that mean something inside one process only; `as_they_are`: items of containers
  whose class hides some.
- `loader_origins`: what patches the DataLoader; `loader_parts`, `workers`: what it remembers;
  `reach`: what a loader reaches.
- `statics`, `settings`: state outside of the frames; `hooks`, `node_hooks`, `logger_filters`,
  `registries`, `finalizers`: what a script has others call.
- `late_reads`: whether a script reads gradients after the optimizer step.
- `plain`: the closed list of names that a pickle may hold.
"""

from __future__ import annotations

from . import loader_origins, node_hooks
from .comparison import Difference
from .continuation import Continuation, RestoreReport
from .frames import FrameMismatch, OtherCode, calls_of, lines_of
from .late_reads import late_read
from .rng import capture_rng, restore_rng

_process = Continuation()


def install(batch_hashes: bool = False) -> None:
    """Has DataLoader iterators remember their origin, notes hooks on autograd's nodes from now on,
    and lets tensors that are known by their places be swapped.

    Args:
        batch_hashes: as in `loader_origins.install`.
    """
    node_hooks.watch()
    _process.watch_swaps()
    loader_origins.install(batch_hashes)


capture, observe, plan = _process.capture, _process.observe, _process.plan
compare, place_of = _process.compare, _process.place_of
why_not_here, leave = _process.why_not_here, _process.leave
note_variables, know_variables = _process.note_variables, _process.know_variables
graphs = _process.graphs

__all__ = [
    "Difference",
    "FrameMismatch",
    "OtherCode",
    "RestoreReport",
    "calls_of",
    "capture",
    "capture_rng",
    "compare",
    "graphs",
    "install",
    "know_variables",
    "late_read",
    "lines_of",
    "note_variables",
    "leave",
    "observe",
    "place_of",
    "plan",
    "restore_rng",
    "why_not_here",
]
