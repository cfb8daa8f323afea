"""Settings of a file that was run without a name in `sys.modules`, or by `exec`: a restart put the
values into another namespace than that of the functions that the file has made."""

from __future__ import annotations

import pytest

from tests.support.killed import Runner

SETTINGS = "lr = 0.05\ndef rate():\n    global lr\n    lr *= 0.9\n    return lr\n"
MODULE = """
import importlib.util, pathlib, tempfile
path = pathlib.Path(tempfile.mkdtemp()) / "settings.py"
path.write_text(TEXT)
spec = importlib.util.spec_from_file_location("settings_of_job", path)
settings = importlib.util.module_from_spec(spec)
spec.loader.exec_module(settings)
rate, here = settings.rate, vars(settings)
"""
LOOP = """
model = torch.nn.Linear(4, 2)
opt = torch.optim.SGD(model.parameters(), lr=0.05)
for _ in range(12):
    opt.param_groups[0]["lr"] = rate()
    opt.zero_grad()
    model(torch.ones(3, 4)).square().mean().backward()
    opt.step()
final(*model.parameters(), lr=here["lr"])
"""


@pytest.mark.parametrize(
    "made",
    [
        "here = {}\nexec(TEXT, here)\nrate = here['rate']\n",
        "here = {'__name__': 'settings'}\nexec(TEXT, here)\nrate = here['rate']\n",
        MODULE,
    ],
    ids=["exec", "exec with a name", "module"],
)
def test_functions_and_values_stay_together(jobs: Runner, made: str) -> None:
    jobs.same(f"TEXT = {SETTINGS!r}\n{made}{LOOP}")
