"""The commit protocol under the model checker: it holds, and without the exchange or the digests it does not."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

MODEL = Path(__file__).resolve().parents[4] / "snapshot" / "commit" / "model" / "run_model"


def test_protocol_holds_and_its_mutations_fail(tmp_path: Path) -> None:
    done = subprocess.run([str(MODEL), str(tmp_path)], capture_output=True, text=True, timeout=300, check=False)
    if done.returncode == 77:
        pytest.skip(done.stdout.strip())
    assert done.returncode == 0, done.stdout + done.stderr
    for mutation in ("mutation_without_digests", "mutation_without_exchange"):
        assert f"{mutation}: fails" in done.stdout
    assert done.stdout.count(": holds") >= 6
