"""Optimizers whose state is sharded over data-parallel ranks, computed a second time on another
rank: `REFT_SNAPSHOT_PROTECTION=aor` (REFT, "asynchronous optimizer recomputation").

ZeroRedundancyOptimizer keeps the state of each parameter on one rank only, so no replica has it.
All ranks have the parameters and the reduced gradients, though. A rank computes what another one
keeps as well, with the gradients and settings that the step uses, after clipping and unscaling.

The second state is equal bit for bit, so nothing drifts, and there is nothing to bring back from
time to time. What Adam, AdamW and SGD keep follows from the gradients by sums and products alone,
without the step of the parameters, which would need roots and divisions; reft rounds them where
torch does, and proves it in the first steps. Every other kind is stepped by torch's own optimizer,
on copies of the parameters (`second_state.py`). From then on the state is a replica like any
other: discovery gives it the names that it has on the rank that keeps it, the ranks compare their
bytes before they share it, and each snapshot compares them again.

Ranks are paired (one set is of three where their number is odd), on different nodes where that is
possible: the members of a set have the same state, so one may stand in for another one that is
lost.

The second step runs in a thread while the training thread does the rank's own one, and has ended
when that returns; if it reads parameters, before their owners send them.

Threads: the training thread calls every method. Errors: none; what cannot be computed is dropped,
and `take_problems` says why.
"""

from __future__ import annotations

import copy
import os
import queue
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from functools import partial, wraps
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from reft._state.second_state import Held, SecondState

_MODULE = "torch.distributed.optim.zero_redundancy_optimizer"
# Those that keep tensors alone, for each parameter by itself, draw no random numbers and write to
# nothing but what they keep and their parameters. Any other class may do what it likes.
_KINDS: tuple[type[Optimizer], ...] = (
    *(torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adamax, torch.optim.NAdam),
    *(torch.optim.RAdam, torch.optim.RMSprop, torch.optim.Rprop, torch.optim.ASGD),
    *(torch.optim.Adagrad, torch.optim.Adadelta),
)
_IN_PLACE = 1 << 16  # parameters up to which a thread would cost more than it saves


def sets_of(ranks: Sequence[int], domain_of: Sequence[int]) -> list[tuple[int, ...]]:
    """Divides ranks into pairs, and one set of three if their number is odd, none if there is one.

    Args:
        domain_of: the node of each rank of the job, or what else is lost at once.
    """
    ordered = sorted(ranks, key=lambda rank: (domain_of[rank], rank))
    half = len(ordered) // 2
    # A node that has no more than half of the ranks never meets itself.
    sets = [[ordered[i], ordered[i + half]] for i in range(half)]
    if len(ordered) % 2 and sets:
        last = domain_of[ordered[-1]]
        # Best where it makes a set survive, then where it is the only one of its node.
        nodes = [{domain_of[rank] for rank in one} for one in sets]
        best = min(range(half), key=lambda i: (last in nodes[i], len(nodes[i]) > 1))
        sets[best].append(ordered[-1])
    return [tuple(sorted(one)) for one in sets]


class _Sharded:
    """One ZeroRedundancyOptimizer, and the replicas that this rank computes.

    Attributes:
        ranks: the members of this rank's set; empty: its state is not computed a second time.
    """

    def __init__(self, optimizer: Any, domain_of: Sequence[int] | None) -> None:
        self.ranks: tuple[int, ...] = ()
        self.replicas: dict[int, SecondState] = {}  # by rank in the optimizer's group
        self.loaded: dict[torch.Tensor, Any] = {}  # from a checkpoint, of ranks of this set
        self._seen: Any = None  # the partition that the replicas are of
        self._others: list[int] = []
        if domain_of is None:
            return
        group = dist.get_process_group_ranks(optimizer.process_group)
        own = group[optimizer.rank]
        for members in sets_of(group, domain_of):
            if own in members:
                self.ranks = members
        self._others = [group.index(rank) for rank in self.ranks if rank != own]

    @property
    def reads_parameters(self) -> bool:
        """Whether the step that is prepared needs the parameters as they are before it."""
        return any(replica.reads_parameters for replica in self.replicas.values())

    def follow(self, optimizer: Any) -> None:
        """Makes the replicas of the partition as it is now.

        Raises:
            ValueError: the optimizer is of a kind that cannot be computed a second time.
        """
        partition = optimizer._partition_parameters()
        seen = [[id(p) for g in partition[i] for p in g["params"]] for i in self._others]
        if seen == self._seen:
            return
        if optimizer._overlap_with_ddp:
            raise ValueError("overlap_with_ddp=True steps it inside of the backward pass")
        if type(optimizer.optim) not in _KINDS:
            name = type(optimizer.optim).__qualname__
            raise ValueError(f"{name} may keep more than reft knows of")
        if any(p.device.type != "cpu" for g in optimizer.param_groups for p in g["params"]):
            raise ValueError("its parameters are not in host memory")

        def make(groups: list[Any]) -> Optimizer:
            made: Optimizer = optimizer._optim_constructor(groups, **optimizer._optim_defaults)
            return made

        known = {p: held[key] for old in self.replicas.values() for p, held, key in old.held()}
        self.replicas = {
            other: SecondState(type(optimizer.optim), make, partition[other])
            for other in self._others
            if any(group["params"] for group in partition[other])
        }
        for replica in self.replicas.values():
            replica.load(known | self.loaded)
        self._seen, self.loaded = seen, {}

    def load(self, optimizer: Any, state: dict[int, Any]) -> None:
        """The script has given the whole optimizer a state: by number of the parameter."""
        parameters = optimizer._index_to_param
        partition = optimizer._partition_parameters()
        wanted = {id(p) for i in self._others for g in partition[i] for p in g["params"]}
        self.loaded = {
            parameters[index]: _as_loaded(value, parameters[index])
            for index, value in state.items()
            if value is not None and id(parameters[index]) in wanted
        }
        for replica in self.replicas.values():
            replica.load(self.loaded)


def _as_loaded(value: dict[str, Any], parameter: torch.Tensor) -> dict[str, Any]:
    """As the optimizer itself takes a parameter's state from a checkpoint."""
    loaded = copy.deepcopy(value)
    for name, one in loaded.items():
        if isinstance(one, torch.Tensor):
            loaded[name] = one.to(parameter.device if one.dim() else "cpu")
    return loaded


class _Worker:
    """A thread that does one thing at a time."""

    def __init__(self) -> None:
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._process = os.getpid()
        threading.Thread(target=self._run, name="reft-recompute", daemon=True).start()

    def begin(self, do: Callable[[], None]) -> _Task:
        task = _Task(do)
        self._tasks.put(task)
        return task

    def wait(self, task: _Task) -> None:
        """Waits for a task, and raises what it raised. A forked child has not the thread."""
        if os.getpid() == self._process:
            task.is_done.wait()
        if task.error is not None:
            raise task.error

    def end(self) -> None:
        self._tasks.put(None)

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            try:
                task.do()
            except BaseException as error:  # noqa: BLE001  # for `wait`
                task.error = error
            task.is_done.set()
            del task  # what it refers to is the script's to free


class _Task:
    def __init__(self, do: Callable[[], None]) -> None:
        self.do = do
        self.is_done = threading.Event()
        self.error: BaseException | None = None


class Recomputation:
    """All that one process computes a second time."""

    def __init__(self) -> None:
        self._domain_of: Sequence[int] | None = None  # None: nothing is
        self._sharded: weakref.WeakKeyDictionary[Any, _Sharded] = weakref.WeakKeyDictionary()
        self._outer: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        self._worker: _Worker | None = None
        self._running: _Sharded | None = None
        self._task: _Task | None = None  # of what is running; None: it is yet to be done
        self._stepping: Any = None  # the sharded optimizer whose step has begun
        self._problems: list[str] = []

    def watch(self, domain_of: Sequence[int]) -> None:
        """Computes a second time what the optimizers of the script keep from now on.

        Args:
            domain_of: as of `sets_of`.
        """
        self._domain_of = domain_of
        _watch_loads()

    @property
    def found(self) -> bool:
        """Whether the script has a sharded optimizer."""
        return bool(self._sharded)

    def take_problems(self) -> list[str]:
        """Why optimizers are not computed a second time, each once."""
        problems, self._problems = self._problems, []
        return problems

    def ranks_of(self, inner: Optimizer) -> tuple[int, ...]:
        """The ranks that have the state of an optimizer that a sharded one steps; empty: only this
        one."""
        sharded = self._of_inner(inner)
        return () if sharded is None else sharded.ranks

    def held_beside(self, inner: Optimizer) -> list[Held]:
        """What this rank has of the state that other ranks' `inner` keeps."""
        return [held for replica in self._replicas_of(inner) for held in replica.held()]

    def places_beside(self, inner: Optimizer) -> list[Held]:
        """Where this rank has that state, or will have it after a step."""
        return [place for replica in self._replicas_of(inner) for place in replica.places()]

    def _replicas_of(self, inner: Optimizer) -> list[SecondState]:
        sharded = self._of_inner(inner)
        return [] if sharded is None else list(sharded.replicas.values())

    def repeats(self, outer: Optimizer) -> bool:
        """Whether an optimizer only repeats what the one that it steps keeps, as a sharded one does
        once it has loaded a checkpoint."""
        return self._sharded.get(outer) is not None if _is_sharded(outer) else False

    def prepare(self, optimizers: Sequence[Optimizer]) -> None:
        """Makes second optimizers for those that have not stepped yet."""
        if self._domain_of is not None:
            for optimizer in filter(_is_sharded, optimizers):
                sharded = self._sharded_of(optimizer)
                if sharded.ranks:
                    self._guarded(sharded, partial(sharded.follow, optimizer))

    def begin(self, optimizer: Optimizer, arguments: Sequence[Any] = ()) -> None:
        """A step is about to begin, with everything that it uses in its place.

        Args:
            arguments: what `step` has been given.
        """
        if self._domain_of is None:
            return
        if _is_sharded(optimizer):
            self._sharded_of(optimizer)
            self._stepping = optimizer
            return
        sharded = self._of_inner(optimizer)
        if sharded is None or not sharded.ranks:
            return
        if (raised := self._running) is not None:  # it has never returned
            self.wait()
            self._drop(raised, ValueError("a step of it has raised"))
        if not sharded.ranks:
            return
        if any(argument is not None for argument in arguments):
            self._drop(sharded, ValueError("step() was given a closure, or other arguments"))
        elif self._guarded(sharded, lambda: self._prepared(sharded, optimizer)):
            self._running = sharded

    def _prepared(self, sharded: _Sharded, inner: Optimizer) -> None:
        sharded.follow(self._outer[id(inner)])
        replicas = list(sharded.replicas.values())
        has_denormals = not _flushes_denormals()
        for replica in replicas:
            replica.prepare(inner.param_groups, has_denormals)
        self._task = None
        if sum(replica.size for replica in replicas) > _IN_PLACE and has_denormals:
            self._worker = self._worker or _Worker()
            self._task = self._worker.begin(lambda: _step_all(replicas))

    def end(self, optimizer: Optimizer) -> None:
        """A step has returned. That of the inner optimizer has, before the ranks exchange their
        parameters."""
        if optimizer is self._stepping:
            self._stepping = None
        if self._running is not None and (self._stepping is None or self._running.reads_parameters):
            self.wait()

    def wait(self) -> None:
        """Waits for the second step."""
        sharded, self._running = self._running, None
        if sharded is not None:
            self._guarded(sharded, lambda: self._finished(sharded))

    def _finished(self, sharded: _Sharded) -> None:
        task, self._task = self._task, None
        if task is None:
            _step_all(list(sharded.replicas.values()))
        elif self._worker is not None:
            self._worker.wait(task)

    def _guarded(self, sharded: _Sharded, do: Callable[[], None]) -> bool:
        """Does it; drops what cannot be computed. Returns whether it was done."""
        try:
            do()
        except Exception as error:  # noqa: BLE001  # training goes on
            self._drop(sharded, error)
            return False
        return True

    def loaded(self, outer: Any, state: dict[str, Any]) -> None:
        """The script is about to load a checkpoint of a whole sharded optimizer."""
        if self._domain_of is None:
            return
        sharded = self._sharded_of(outer)
        if sharded.ranks:  # if there is something wrong with it, the optimizer says so
            self._guarded(sharded, lambda: sharded.load(outer, state["state"]))

    def forget(self) -> None:
        """Computes nothing any more."""
        self.wait()
        if self._worker is not None:
            self._worker.end()
        self.__init__()  # type: ignore[misc]

    def _of_inner(self, inner: Optimizer) -> _Sharded | None:
        outer = self._outer.get(id(inner))
        return None if outer is None or outer.optim is not inner else self._sharded.get(outer)

    def _sharded_of(self, outer: Any) -> _Sharded:
        sharded = self._sharded.get(outer)
        if sharded is None:
            try:
                sharded = _Sharded(outer, self._domain_of)
            except Exception as error:  # noqa: BLE001  # its process group may be gone
                sharded = _Sharded(outer, None)
                self._drop(sharded, error)
            self._sharded[outer] = sharded
        if isinstance(inner := getattr(outer, "optim", None), Optimizer):
            self._outer[id(inner)] = outer
        return sharded

    def drop(self, inner: Optimizer, why: str) -> None:
        """What another rank keeps of `inner` is not known here."""
        if (sharded := self._of_inner(inner)) is not None and sharded.ranks:
            self._drop(sharded, ValueError(why))

    def _drop(self, sharded: _Sharded, error: Exception) -> None:
        sharded.ranks, sharded.replicas, sharded.loaded = (), {}, {}
        self._problems.append(f"{type(error).__name__}: {error}" if str(error) else repr(error))


def _step_all(replicas: list[SecondState]) -> None:
    for replica in replicas:
        replica.step()


def _is_sharded(optimizer: Optimizer) -> bool:
    module = sys.modules.get(_MODULE)
    return module is not None and isinstance(optimizer, module.ZeroRedundancyOptimizer)


def _flushes_denormals() -> bool:
    """Whether this thread rounds tiny numbers to zero, which another one would not do."""
    return bool(torch.tensor(1e-310, dtype=torch.float64) * 1 == 0)


def _watch_loads() -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    original = ZeroRedundancyOptimizer.load_state_dict
    if hasattr(original, "_reft_original"):
        return

    @wraps(original)
    def load_state_dict(self: Any, state_dict: dict[str, Any]) -> None:
        of_process.loaded(self, state_dict)  # before it drops what is of other ranks
        original(self, state_dict)

    load_state_dict._reft_original = original  # type: ignore[attr-defined]
    ZeroRedundancyOptimizer.load_state_dict = load_state_dict  # type: ignore[method-assign]


of_process = Recomputation()
