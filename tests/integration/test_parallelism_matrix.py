"""Every kind of parallelism trains under reft to the very bits that it trains to under gloo (4 ranks, CPU)."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402

if "reft" not in dist.Backend.backend_list:
    pytest.skip("the package reft is not installed for this Python", allow_module_level=True)

pytestmark = pytest.mark.exact
WORKER = Path(__file__).with_name("parallelism_worker.py")
CASES = re.findall(r"^@case\ndef (\w+)\(", WORKER.read_text(encoding="utf-8"), re.MULTILINE)

# gloo refuses to send to itself, which the V-shaped schedule's turning point does. The same stages
# under another schedule add up the same gradients in another order.
NOT_UNDER_GLOO = {"pipeline_zbv_zero_bubble": "pipeline_interleaved_1f1b"}


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Results of all selected cases under both backends, from one start of the worker."""
    here = [item for item in request.session.items if item.path == Path(__file__)]
    chosen = {item.callspec.params["name"] for item in here if hasattr(item, "callspec")}
    chosen |= {NOT_UNDER_GLOO[name] for name in chosen & set(NOT_UNDER_GLOO)}
    names = [name for name in CASES if name in chosen]
    directory = tmp_path_factory.mktemp("parallelism")
    results, log = directory / "results.json", directory / "log"
    found: dict[str, Any] = {}
    for backend in ("gloo", "reft"):
        selected = [name for name in names if backend != "gloo" or name not in NOT_UNDER_GLOO]
        command = [sys.executable, str(WORKER), "--backend", backend, "--results", str(results), *selected]
        environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        with open(log, "wb") as output:
            done = subprocess.run(command, stdout=output, stderr=output, env=environment, timeout=900)
        assert done.returncode == 0, log.read_text(errors="replace")[-4000:]
        found |= json.loads(results.read_text(encoding="ascii"))
    return found


def values_of(outcomes: dict[str, Any], backend: str, name: str) -> list[list[str]]:
    result = outcomes[backend][name]
    assert not result["error"], f"{name} under {backend}: {result['error']}"
    values: list[list[str]] = result["values"]
    assert any(values)
    return values


@pytest.mark.parametrize("name", [name for name in CASES if name not in NOT_UNDER_GLOO])
def test_bit_equal_to_gloo(outcomes: dict[str, Any], name: str) -> None:
    assert values_of(outcomes, "reft", name) == values_of(outcomes, "gloo", name)


@pytest.mark.parametrize("name", list(NOT_UNDER_GLOO))
def test_trains_where_gloo_refuses(outcomes: dict[str, Any], name: str) -> None:
    reference = values_of(outcomes, "gloo", NOT_UNDER_GLOO[name])
    losses = [float.fromhex(value) for rank in reference for value in rank if "p" in value]
    here = [float.fromhex(value) for rank in values_of(outcomes, "reft", name) for value in rank if "p" in value]
    assert len(here) == len(losses) == 12
    assert here == pytest.approx(losses, rel=1e-4)
