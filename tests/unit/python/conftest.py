"""What the unit tests of the Python parts share."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from reft import _C, _voice
from reft._session import current
from reft._session.boundary import Boundary
from reft._session.session import Session
from reft._state import gradients, naming, registry
from tests.fakes.native import FakeNative
from tests.support.jobs import agreed, trusted

Settings = Callable[..., dict[str, Any]]


@pytest.fixture(autouse=True)
def fresh_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No session, no warning and no registered object of another test; nothing set but defaults."""
    for name in [name for name in os.environ if name.startswith("REFT_")]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(current, "_owner", current._Owner())
    monkeypatch.setattr(_voice, "_warned", set())
    monkeypatch.setattr(registry, "objects", {})
    monkeypatch.setattr(naming, "of_process", naming.ModuleNames())
    monkeypatch.setattr(gradients.of_process, "outlive", False)
    yield
    current._owner.replace(None)


@pytest.fixture
def native(monkeypatch: pytest.MonkeyPatch) -> FakeNative:
    """The native module on stand-ins. Optimizers that other tests left alive do not count."""
    monkeypatch.setattr(Boundary, "_alone", staticmethod(lambda optimizer: True))
    return FakeNative().install(monkeypatch)


@pytest.fixture
def settings(monkeypatch: pytest.MonkeyPatch) -> Settings:
    """Makes settings as the environment would give them: `settings(REFT_RESUME="state")`."""

    def make(**values: str) -> dict[str, Any]:
        for name, value in values.items():
            monkeypatch.setenv(name, value)
        return _C.environment()

    return make


@pytest.fixture
def start(native: FakeNative, settings: Settings) -> Iterator[Callable[..., Session]]:
    """Starts a session of one rank on stand-ins: `start(REFT_STRICT="1")`."""
    made: list[Session] = []

    def run(**values: str) -> Session:
        env = settings(**values)
        session = Session(env, agreed(), trusted(), 1)
        made.append(session)
        session.start()
        return session

    yield run
    for session in made:
        session.stop(at_exit=False)


@pytest.fixture
def train() -> Callable[..., torch.optim.Optimizer]:
    return trained


def trained(
    steps: int = 1, optimizer: torch.optim.Optimizer | None = None
) -> torch.optim.Optimizer:
    """Steps an optimizer, a new one of a small model by default."""
    if optimizer is None:
        optimizer = torch.optim.Adam(torch.nn.Linear(3, 2).parameters(), lr=0.1)
    for _ in range(steps):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    return optimizer
