"""Walks a captured graph beside the live objects of a restarted process and plans the writes.

Each node finds its live counterpart, by the place where the object stood at the first program
point, else by the same path. The differences become writes; nothing live is touched until
`RestoreWalk.apply`. What is done with one object is the business of its kind (`kinds`).

Threads: the training thread. Errors: `nodes.Stray` where the loop cannot do without a live
counterpart; what else cannot be put back is reported, not raised.
"""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable
from typing import Any

from reft._state.device_parts import contents

from . import handles, hooks, node_hooks
from .births import MEMBER
from .dealing import Resized
from .foreign import slot_names
from .kinds.functions import BoundBuiltin, Method
from .kinds.objects import Lost, Owned
from .kinds.table import rule_of
from .kinds.temporaries import Moved
from .kinds.tensors import Array, Tensor
from .memory import Memory
from .nodes import (
    KEEP,
    LATER,
    MISSING,
    UNBOUND,
    At,
    Graph,
    Named,
    Node,
    Refusal,
    Report,
    find_type,
    handle_in,
    identity_in,
    index_of,
    ref,
    type_name,
)

_EXITS = frozenset({"__exit__", "__aexit__"})
_RANK = re.compile(r"(?:^|[ :._])rank$")

PlanGenerator = Callable[["RestoreWalk", Any, Any, str], Any]


class RestoreWalk:
    """Plans the writes that give live objects their captured values.

    Args:
        graph: From `CaptureWalk.graph`.
        born: Live objects by the place where they stood at the first program point.
        plan_generator: Plans the writes to a suspended generator, or to a new one if there is none
            (MISSING), and returns it.
        foreign: The nodes are another rank's: what is called a rank keeps its live value.
        owned_storages: As of `CaptureWalk`, of this process.
        resized: Set if another number of ranks goes on.
        moved: Temporary places of the process before that are gone.

    Attributes:
        graph: What was captured.
        problems: What cannot be put back.
        is_foreign: As `foreign`.
        resized: As `resized`.
        moved: As `moved`.
        memory: Places the tensors and arrays.
        contents: Writes to objects.
        positions: Writes that need the objects' contents.
    """

    rule_of = staticmethod(rule_of)

    def __init__(
        self,
        graph: Graph,
        born: dict[str, Any],
        plan_generator: PlanGenerator,
        foreign: bool,
        owned_storages: frozenset[int],
        resized: Resized | None,
        moved: Moved,
    ) -> None:
        self.graph = graph
        self.problems: Report = []
        self.contents: list[Callable[[], Any]] = []
        self.positions: list[Callable[[], Any]] = []
        self._last: list[Callable[[], Any]] = []
        self._afterwards: list[Callable[[], Any]] = []
        in_memory = {
            index: node
            for index, node in enumerate(graph.nodes)
            if isinstance(node, (Tensor, Array)) and node.has_memory()
        }
        self.memory = Memory(in_memory, self._lasting, owned_storages)
        self._born = born
        self._plan_generator = plan_generator
        self.is_foreign, self.resized, self.moved = foreign, resized, moved
        self._handles: frozenset[int] | None = None
        # Ids of live objects that are written where they stand: parts of modules and loaders.
        self._fixed: set[int] = set()
        # Nodes whose parts are being resolved, and what was made for them early.
        self._begun: dict[int, Any] = {}
        self._done: dict[int, Any] = {}
        self._claimed: set[int] = set()
        self._made_weak: list[tuple[At, Callable[[], Any]]] = []
        self._alive: list[Any] = []

    def resolve(self, encoded: Any, live: Any, place: str) -> Any:
        """Returns the object that stands for an encoded value; KEEP to leave what is there.

        Args:
            encoded: From `CaptureWalk.encode`.
            live: What is at the same place now.
            place: The place, for reports.
        """
        if self.is_foreign and live is not MISSING and _RANK.search(place):
            return KEEP
        if type(encoded) is not tuple:
            return KEEP if self._follows_from_ranks(encoded, live, place) else encoded
        number = handle_in(encoded)
        if number is not MISSING:
            if self._follows_from_ranks(number, live, place):
                return KEEP  # it only happened to have a descriptor's number
            # A counter may only have happened to have a descriptor's number: then what is live is
            # none.
            if self._handles is None:
                self._handles = handles.now()
            if live is MISSING or handles.is_handle(live, self._handles):
                return KEEP
            return number
        if (of := identity_in(encoded)) is not None:
            owner = self.born(of[0])
            if owner is MISSING:
                return KEEP
            return object.__hash__(owner) if of[1] else id(owner)
        index = index_of(encoded)
        if index is None:
            return KEEP
        if index in self._done:
            return self._done[index] if index not in self._begun else self._led_back(index, place)
        self._done[index] = KEEP  # a cycle through an immutable value ends here
        self._begun[index] = None
        birth = self.graph.births[index]
        if self.resized is not None and birth is not None:
            place = birth  # as what was there at first is named
        at = At(index, birth, self.graph.types[index], place)
        node = self.graph.nodes[index]
        try:
            result = node.restore(at, live, self)
        except Refusal:
            raise
        except Exception as error:
            if node.is_position:
                raise
            # A user's class may do anything when an object of it is made. The others are still
            # worth having.
            result = self.problem(at, f"cannot make it: {type(error).__name__}: {error}")
        finally:
            early = self._begun.pop(index)
        if early is not None and early is not KEEP and result is not KEEP:
            result = early
        self._done[index] = result
        return result

    def _led_back(self, index: int, place: str) -> Any:
        """What stands for a node whose parts have led back to it: a weak reference, or a method,
        whose object is known by now can be made already."""
        node = self.graph.nodes[index]
        needed = index_of(node.leads_to())
        is_known = needed is not None and self._done.get(needed, KEEP) is not KEEP
        if self._done[index] is KEEP and is_known:
            at = At(index, self.graph.births[index], self.graph.types[index], place)
            made = node.restore(at, MISSING, self)
            self._done[index] = self._begun[index] = made
        return self._done[index]

    def _follows_from_ranks(self, value: Any, live: Any, place: str) -> bool:
        """Whether a number or a string may be what another number of ranks makes it: it has not
        changed since the first program point."""
        if self.resized is None or live is MISSING or type(live) is not type(value):
            return False
        first = self.resized.first.get(place, MISSING)
        return type(first) is type(value) and bool(first == value)

    def resolve_born(self, kind: type[Node], wanted: Callable[[Any], bool]) -> None:
        """Resolves the nodes of one kind whose objects have lived since the first program point, if
        those are `wanted`."""
        for index, node in enumerate(self.graph.nodes):
            place = self.graph.births[index]
            live = self._born.get(place or "", MISSING)
            if isinstance(node, kind) and live is not MISSING and wanted(live):
                assert place is not None
                self.resolve(ref(index), live, place)

    def resolve_again(self, encoded: Any, live: Any, place: str) -> Any:
        """As `resolve`, of what nothing stood for until now."""
        index = index_of(encoded)
        if index is not None and self._done.get(index) is KEEP:
            del self._done[index]
        return self.resolve(encoded, live, place)

    def write(self, action: Callable[[], Any]) -> None:
        """Adds a write to a frame or namespace; objects get their contents before that."""
        self._last.append(action)

    def afterwards(self, action: Callable[[], Any]) -> None:
        """Adds what needs everything else to be back."""
        self._afterwards.append(action)

    def apply(self) -> None:
        """Does all writes. A write that fails is reported and the others go on."""
        for action in (*self.contents, *self.positions, *self._last, *self._afterwards):
            try:
                action()
            except Exception as error:
                self.problems.append(("write", type(error).__name__, str(error)))

    def written(self) -> list[Any]:
        """Gives the live objects that now have captured contents."""
        nodes = self.graph.nodes
        return [live for index, live in self._done.items() if not isinstance(nodes[index], Owned)]

    def leads_weakly(self, at: At, referent: Callable[[], Any]) -> None:
        """Notes a weak reference that was made: something else must hold what it leads to."""
        self._made_weak.append((at, referent))

    def end(self) -> Report:
        """Forgets all objects; returns the problems, with the weak references that lead nowhere
        now."""
        self._done.clear()
        self._alive.clear()
        self._born.clear()
        for writes in (self.contents, self.positions, self._last, self._afterwards):
            writes.clear()
        for at, referent in self._made_weak:
            if referent() is None:
                self.problem(at, "what held the object that it led to is not restored")
        return self.problems

    def problem(self, at: At, reason: str, place: str | None = None) -> Any:
        """Reports what cannot be put back; returns KEEP."""
        self.problems.append((place or at.place, at.type_name, reason))
        return KEEP

    def came_later(self, at: At) -> Any:
        """Reports an object that a restarted script has not made, and that cannot be made for it.
        Returns KEEP."""
        return self.problem(at, LATER)

    def stays_half(self, at: At, name: str) -> Any:
        """Reports an object that was to be made and lacks an attribute: half of one is worse than
        none. Returns KEEP."""
        return self.problem(at, f"{LATER}, and so was its {name}")

    def born(self, place: str | None, otherwise: Any = MISSING) -> Any:
        """Returns the live object that stood at a place at the first program point."""
        return otherwise if place is None else self._born.get(place, otherwise)

    def stands(self, at: At, target: Any) -> None:
        """Notes the object that stands for a node, before its parts are resolved: they may lead
        back to it."""
        self._done[at.index] = target

    def becomes(self, encoded: Any, made: Any, live: Any) -> bool:
        """Gives a live tensor the memory of the one that was made for a value, and stands for it,
        as when a script casts a module: others hold the live one. Returns whether it can."""
        index = index_of(encoded)
        torch: Any = sys.modules["torch"]
        kinds = (torch.Tensor, torch.nn.Parameter)
        if index is None or type(made) not in kinds or type(live) is not type(made):
            return False
        node = self.graph.nodes[index]
        if not isinstance(node, Tensor) or node.tags or node.hooks or node.grad is not None:
            return False
        # Another one than at the first program point, or what another node stands for.
        if id(live) in self._claimed or self.born(self.graph.births[index]) is not live:
            return False
        self._done[index] = live
        self.claim(live)
        self.contents.append(lambda: setattr(live, "data", made.data))
        if live.grad is not None:
            self.contents.append(lambda: setattr(live, "grad", None))
        return True

    def target(self, at: At, live: Any) -> Any:
        """Returns the live object that a node is; MISSING if there is none.

        The object that was born at the same place comes first, then what stands there now.
        """
        for candidate in (self.born(at.birth), live):
            if (
                candidate is MISSING
                or type_name(type(candidate)) != at.type_name
                or id(candidate) in self._claimed
            ):
                continue
            self.claim(candidate)
            return candidate
        return MISSING

    def container(self, at: At, live: Any) -> Any:
        """As `target`, for what can as well be made anew.

        Only what has lived since the first program point is taken. What else stands at the same
        place may be an item of the data that the variable does not mean any more.
        """
        return self.target(at, live if id(live) in self._fixed else MISSING)

    def claim(self, target: Any) -> None:
        """Notes that a live object stands for a node, and for no other one."""
        self._claimed.add(id(target))
        self._alive.append(target)

    def is_claimed(self, live: Any) -> bool:
        """Whether a live object stands for a node already."""
        return id(live) in self._claimed

    def fix(self, *live: Any) -> None:
        """Notes live objects that are written where they stand."""
        self._fixed.update(map(id, live))

    def keep_alive(self, value: Any) -> None:
        """Keeps an object that nothing else holds: its id must stay its own until the end."""
        self._alive.append(value)

    def type_of(self, at: At, live: Any) -> type | None:
        """Returns the class of a node.

        One that was made inside a function has no name to find it by, but the live object may be of
        it.
        """
        found = find_type(at.type_name)
        return type(live) if found is None and type_name(type(live)) == at.type_name else found

    def made(self, at: At, base: type, live: Any) -> Any:
        """Makes an empty object of a container's class; MISSING if the class is not there."""
        kind: Any = self.type_of(at, live)
        return kind.__new__(kind) if kind is not None and issubclass(kind, base) else MISSING

    def children(self, items: list[Any], live: list[Any], place: str) -> list[Any] | None:
        """Resolves the items of a sequence; None if one of them cannot be put back."""
        if live and self.resized is not None and self.resized.first.get(f"{place}[]") == items:
            return live  # as at first: they may follow from the number of ranks
        result: list[Any] = []
        for i, item in enumerate(items):
            there = live[i] if i < len(live) else MISSING
            value = self.resolve(item, there, f"{place}[{i}]") if type(item) is tuple else item
            if value is KEEP:
                if there is MISSING:
                    return None
                value = there
            result.append(value)
        return result

    def put_attributes(self, attributes: Named, target: Any, place: str) -> None:
        """Plans the writes to an object's `__dict__` and `__slots__`."""
        slots = slot_names(type(target))
        for name, item in attributes:
            if name == MEMBER:
                target.__dict__ = target
                return
            if name in slots:
                there = getattr(target, name, MISSING)
                put = functools.partial(object.__setattr__, target, name)
            else:
                there = target.__dict__.get(name, MISSING)
                put = functools.partial(target.__dict__.__setitem__, name)
            if item == UNBOUND:
                self.contents.append(functools.partial(target.__dict__.pop, name, None))
                continue
            known = len(self.problems)
            value = self.resolve(item, there, f"{place}.{name}")
            if value is not KEEP:
                self.contents.append(functools.partial(put, value))
            elif there is MISSING and len(self.problems) == known:
                self.problems.append((f"{place}.{name}", "", LATER))

    def put_all_attributes(self, attributes: Named, target: Any, place: str) -> None:
        """As `put_attributes`, of what `CaptureWalk.attributes` took: others have been deleted."""
        self.put_attributes(attributes, target, place)
        known = {name for name, _ in attributes}
        held = getattr(target, "__dict__", None)
        if MEMBER in known or not held or self.is_foreign:  # another rank may never have had them
            return
        for name in held:
            if name not in known:
                self.contents.append(functools.partial(held.pop, name, None))

    def put_hooks(self, saved: Named, there: hooks.Hooks, place: str) -> None:
        """Puts back what hooks keep; which ones there are is left to the restarted script."""
        live = dict(there)
        for name, item in saved:
            if item == UNBOUND:
                why = "removed after the first step" if live.pop(name, None) is not None else ""
            elif name in live:
                hook = live.pop(name)
                value = self.resolve(item, hook, f"{place}.{name}")
                why = "" if value is KEEP or value is hook else "replaced after the first step"
            else:
                why = "registered after the first step"
            if why:
                self.problems.append((f"{place}.{name}", "hook", why))
        for name in live:
            if not name.startswith(node_hooks.NAMED):  # a node that ends with its iteration
                self.problems.append((f"{place}.{name}", "hook", "removed after the first step"))

    def room_for(self, at: At, node: Tensor | Array, live: Any) -> Any:
        """Returns the live tensor or array that a node is put into; None if it is made anew."""
        lasting = self._lasting(at.index)
        if lasting is not None:
            return lasting
        fits = id(live) in self._fixed and id(live) not in self._claimed and node.can_take(live)
        return live if fits else None

    def plan_generator(self, record: Any, generator: Any, place: str) -> Any:
        """Plans the writes to a suspended generator; None if it cannot be made."""
        return self._plan_generator(self, record, generator, place)

    def is_made_anew(self, index: int) -> bool:
        """Says whether an object can be built from its node.

        It cannot if something in it is left to the restarted script.
        """
        seen, left = {index}, [index]
        while left:
            node = self.graph.nodes[left.pop()]
            if not node.is_made_anew():
                return False
            for part in node.parts():
                if type(part) is not tuple:
                    continue
                inner = index_of(part)
                if inner is None:
                    return False
                if inner not in seen:
                    seen.add(inner)
                    left.append(inner)
        return True

    def lost_reason(self, encoded: Any) -> str | None:
        """Says why a value could not be captured; None if it was."""
        node = self.graph.node(encoded)
        return node.reason if isinstance(node, Lost) else None

    def is_position(self, encoded: Any) -> bool:
        """Says whether a value is a position in a loop."""
        node = self.graph.node(encoded)
        return node is not None and node.is_position

    def other_block(self, encoded: Any, live: Any) -> str | None:
        """Says so if a `with` block is of another class than the live one.

        A block is known by the `__exit__` on the value stack.
        """
        index = index_of(encoded)
        if getattr(live, "__name__", "") not in _EXITS or index is None:
            return None
        node = self.graph.nodes[index]
        here, there = type_name(type(live)), self.graph.types[index]
        if isinstance(node, (Method, BoundBuiltin)):
            owner = index_of(node.owner)
            if owner is not None:
                here, there = type_name(type(live.__self__)), self.graph.types[owner]
        if here == there:
            return None
        return (
            f"the loop was inside a `with` block of {there}, and is inside one of {here} in the"
            " restarted script"
        )

    def _lasting(self, index: int) -> Any:
        """Returns the live tensor or array that has lived since the first program point, as the
        captured one has; None if none fits.

        Only what stands at that place is not enough: it may be an item of the data that the
        variable does not mean any more.
        """
        node = self.graph.nodes[index]
        candidate = self.born(self.graph.births[index], None)
        if candidate is None or type_name(type(candidate)) != self.graph.types[index]:
            return None
        if not isinstance(node, (Tensor, Array)) or not node.can_take(candidate):
            return None
        return None if self.memory.is_owned(candidate) else candidate


def put_in(graph: Graph, room: bytes) -> None:
    """Puts what has come into the room for device memory into the nodes of tensors."""
    for index, node in enumerate(graph.nodes):
        if isinstance(node, Tensor) and type(node.data) is tuple:
            graph.nodes[index] = node.with_data(contents(node.data, room))
