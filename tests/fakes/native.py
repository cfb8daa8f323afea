"""Stand-ins for the parts of `reft._C` that need an agent or a vault.

`FakeNative.install` puts them into the module; everything else of it stays as it is. They record
what they are asked and answer as a test has set them up. `tests/unit/python/test_fakes.py` compares
their signatures with those of `_C.pyi`.

A store needs no fake: `torch.distributed.HashStore` is one, in memory (`support/jobs.trusted`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from reft import _C
from reft._link import agent_protocol, gather
from reft._link.trusted_store import TrustedStore


class FakeAgentClient:
    """An agent that is connected and has no vaults.

    Attributes:
        sent: (type, payload) of the messages.
        left: whether `bye_at_exit` was called.
        closed: whether `close` was.
    """

    def __init__(
        self, socket_path: str, hello: str, timeout_ms: int, agent_argv: Sequence[str] = ()
    ) -> None:
        self.socket_path, self.hello = socket_path, json.loads(hello)
        self.timeout_ms, self.agent_argv = timeout_ms, list(agent_argv)
        self.sent: list[tuple[int, str]] = []
        self.left = self.closed = False

    def send(self, type: int, payload: str) -> bool:
        self.sent.append((type, payload))
        return True

    def keep_saying(self, type: int, payload: str) -> None:
        self.sent.append((type, payload))

    def close(self) -> None:
        self.closed = True

    def bye_at_exit(self, error_file: str = "") -> None:
        self.left = True

    def request(
        self, type: int, payload: str, answer: int, timeout_ms: int = 10000
    ) -> tuple[str, int]:
        assert type == agent_protocol.VAULT_LIST, f"an agent without vaults is asked for {type}"
        return json.dumps({"vaults": []}), -1

    @property
    def connected(self) -> bool:
        return True

    @property
    def welcome(self) -> str:
        return json.dumps({"agent_pid": 1, "version": "", "run_dir": "", "linger_sec": 1})

    def notes(self) -> list[list[str]]:
        """All notes that the agent has now."""
        texts = [payload for kind, payload in self.sent if kind == agent_protocol.NOTES]
        return list(json.loads(texts[-1])["notes"]) if texts else []


@dataclass
class Capture:
    """One call of `FakeEngine.capture`."""

    step: int
    tensors: list[torch.Tensor]
    objects: bytes
    gated: bool


class FakeEngine:
    """A snapshot engine that copies nothing.

    Attributes:
        options: what the constructor got.
        calls: names of the calls, in their order; `capture` with what it returned.
        tables: what `set_table` got: (regions, groups).
        asks: and whether the votes ask for a plan of all ranks.
        round: what `plan_round` returns.
        captures: see `Capture`.
        results: what the next captures return; "taken" once it is empty.
        errors: exceptions by name of the method that raises them.
        late: what the next `take_late_written` returns.
        due: what `begin_point` returns.
        counters: what `stats` returns.
    """

    def __init__(self, **options: Any) -> None:
        self.options = options
        self.calls: list[str] = []
        self.tables: list[tuple[list[Any], list[Any]]] = []
        self.asks: list[bool] = []
        self.protected: list[str] = []
        self.exceeds = False
        self.round = (-1, False)
        self.captures: list[Capture] = []
        self.results: list[str] = []
        self.errors: dict[str, Exception] = {}
        self.late: list[int] = []
        self.marks = (0, False)
        self.restoring = (0, 0, 0)
        self.given_back: list[bool] = []
        self.due = True
        self.restore_ns = self.recomputing = self.resume_verdict = 0
        self.counters: dict[str, Any] = {
            "slot_bytes": 0,
            "payload_bytes": 0,
            "vault_bytes": 0,
            "note": "",
        }
        self.rhythm = (1, 0, -1)
        self.newest = -1

    def _called(self, name: str, detail: str = "") -> None:
        self.calls.append(name + detail)
        if name in self.errors:
            raise self.errors[name]

    def ask_room(self, room: Callable[[int], bool]) -> None: ...

    def set_table(
        self,
        regions: Sequence[tuple[str, torch.Tensor, int, bool, bool]],
        groups: Sequence[tuple[str, Sequence[int]]],
        plan_anew: bool = False,
        splits: Sequence[tuple[str, str, int, Sequence[int]]] = (),
    ) -> None:
        self._called("set_table")
        self.tables.append((list(regions), list(groups)))
        self.asks.append(plan_anew)

    def protect(self, setting: str) -> None:
        self.protected.append(setting)

    @property
    def exceeds_at_longest(self) -> bool:
        return self.exceeds

    @property
    def plan_round(self) -> tuple[int, bool]:
        return self.round

    def pass_over(self, step: int, why: str, plan_anew: bool) -> None:
        self._called("pass_over", " anew" if plan_anew else "")

    def capture(
        self,
        step: int,
        tensors: list[torch.Tensor],
        objects: bytes,
        parts: list[tuple[torch.Tensor, int]],
        writers: list[tuple[int, int]],
        gated: bool = True,
    ) -> str:
        result = self.results.pop(0) if self.results else "taken"
        self._called("capture", f" {result}")
        self.captures.append(Capture(step, tensors, objects, gated))
        return result

    def leave_out(self, step: int) -> None:
        self._called("leave_out")

    def gate(self) -> int:
        self._called("gate")
        return 0

    def set_policy(self, policy: str) -> None:
        self._called("set_policy")

    def take_late_written(self) -> list[int]:
        late, self.late = self.late, []
        return late

    @property
    def committed_step(self) -> int:
        return self.newest

    def drain(self, timeout_ms: int) -> bool:
        self._called("drain")
        return True

    def begin_point(self, step: int) -> bool:
        self._called("begin_point")
        return self.due

    def end_point(self) -> None:
        self._called("end_point")

    @property
    def vault_lost(self) -> bool:
        return False

    @property
    def cadence(self) -> tuple[int, int, int]:
        return self.rhythm

    def set_restored(
        self, nanoseconds: int, memory_bytes: int, storage_bytes: int, received_bytes: int
    ) -> None:
        self.restore_ns = nanoseconds

    def set_recomputing(self, step: int) -> None:
        self.recomputing = step

    def set_restoring(self, step: int, way: int, tries: int) -> None:
        self.restoring = step, way, tries

    def set_memory_marks(self, oom_mark: int, given_up: bool) -> None:
        self.marks = oom_mark, given_up

    def give_back(self, everything: bool) -> int:
        self.given_back.append(everything)
        return 4096

    def set_resume_verdict(self, verdict: int) -> None:
        self.resume_verdict = verdict

    def stats(self) -> dict[str, Any]:
        return self.counters

    @property
    def fd(self) -> int:
        return -1


class FakeEvidenceExchange:
    """The exchange of hang evidence between nodes, of which nobody asks anything."""

    def __init__(
        self, client: Any, store: Any, seal: Any, node: int, nodes: int, incarnation: int
    ) -> None:
        self.node, self.nodes = node, nodes


# Name in `_C` → stand-in.
CLASSES: dict[str, type[Any]] = {
    "AgentClient": FakeAgentClient,
    "Rank": FakeEngine,
    "EvidenceExchange": FakeEvidenceExchange,
}


@dataclass
class FakeNative:
    """The stand-ins of one test.

    Attributes:
        clients: those that were made, oldest first; `engines` and `exchanges` likewise.
        fail: exceptions by name of the class whose constructor raises them.
        replies: for which clients stack dumps and verdict notices were installed.
    """

    clients: list[FakeAgentClient] = field(default_factory=list)
    engines: list[FakeEngine] = field(default_factory=list)
    exchanges: list[FakeEvidenceExchange] = field(default_factory=list)
    fail: dict[str, Exception] = field(default_factory=dict)
    replies: list[Any] = field(default_factory=list)
    new_engine: Callable[[FakeEngine], None] = lambda engine: None

    @property
    def client(self) -> FakeAgentClient:
        return self.clients[-1]

    @property
    def engine(self) -> FakeEngine:
        return self.engines[-1]

    def install(self, monkeypatch: pytest.MonkeyPatch) -> FakeNative:
        """Puts the stand-ins into `_C`, until the test ends."""
        made = {
            "AgentClient": self.clients,
            "Rank": self.engines,
            "EvidenceExchange": self.exchanges,
        }

        def maker(name: str) -> Callable[..., Any]:
            def make(*args: Any, **kwargs: Any) -> Any:
                if name in self.fail:
                    raise self.fail[name]
                one = CLASSES[name](*args, **kwargs)
                made[name].append(one)
                if isinstance(one, FakeEngine):
                    self.new_engine(one)
                return one

            return make

        for name in CLASSES:
            monkeypatch.setattr(_C, name, maker(name))
        monkeypatch.setattr(
            _C, "install_stack_replies", lambda client, *_: self.replies.append(client)
        )
        monkeypatch.setattr(_C, "install_verdict_notices", lambda client: None)
        monkeypatch.setattr(_C, "install_fault_words", lambda client: None)
        return self


def answer_for_all(
    store: TrustedStore, name: str, text: str = "", refusals: dict[int, str] | None = None
) -> None:
    """Puts the result of a round (`_link/gather.py`) into a store, as rank 0 does."""
    answer = gather._pack(gather.Gathered(text, refusals or {}))
    store.put("round", f"{name}/job", 0, answer)
