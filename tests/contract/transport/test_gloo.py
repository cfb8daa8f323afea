"""The contract of the peer transport (transport_contract.h), over gloo."""

from __future__ import annotations

import importlib.util
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("reft._C")
ROOT = Path(__file__).resolve().parents[3]
WORLD = 3


@pytest.fixture(scope="module")
def contract() -> Any:
    """The module that the build has made of gloo_contract.cc; the newest, if there are several."""
    name = f"gloo_contract.{sysconfig.get_config_var('SOABI')}.so"
    found = sorted(ROOT.glob(f"build*/**/{name}"), key=lambda path: path.stat().st_mtime)
    if not found:
        pytest.skip("gloo_contract is not built: run tools/dev build")
    spec = importlib.util.spec_from_file_location("gloo_contract", found[-1])
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.timeout(120)
@pytest.mark.parametrize("case", ["ManyInFlight", "TagsKeepMessagesApart", "OneTagKeepsOrder", "LargeMessage"])
def test_the_transport_over_gloo_keeps_the_promise(contract: Any, case: str) -> None:
    import torch.distributed as dist

    assert case in contract.cases() and len(contract.cases()) == 4
    store, done = dist.HashStore(), Barrier(WORLD, timeout=60)

    def rank(number: int) -> None:
        backend = dist.ProcessGroupGloo(store, number, WORLD, timedelta(seconds=60))
        contract.run(case, backend, number, WORLD)
        done.wait()  # a backend that goes away takes its connections along

    with ThreadPoolExecutor(WORLD) as pool:
        for call in [pool.submit(rank, number) for number in range(WORLD)]:
            call.result()
