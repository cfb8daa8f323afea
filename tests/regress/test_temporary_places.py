"""A resume restored the name of a temporary directory that had gone with the process: every attempt
failed to save into it, until the launcher gave up. It lost what temporary files held, silently."""

from __future__ import annotations

import pytest

from tests.support.killed import Runner

DIRECTORY = """
import glob, pathlib, shutil, tempfile
prefix = f"of-{os.environ['REFT_JOB_ID']}-"
MADE
if attempt and GONE:
    for old in glob.glob(os.path.join(tempfile.gettempdir(), prefix + "*")):
        if old != str(d):
            shutil.rmtree(old)
model = torch.nn.Linear(4, 2)
opt = torch.optim.SGD(model.parameters(), lr=0.05)
newest = f"{d}/none"
for step in range(12):
    opt.zero_grad()
    model(torch.randn(3, 4)).square().mean().backward()
    opt.step()
    newest = f"{d}/{step}.pt"
    torch.save(model.state_dict(), newest)
assert os.path.dirname(newest) == str(d) and newest.endswith("11.pt")
kept = [] if GONE else sorted(os.listdir(d))
shutil.rmtree(d)
final(*model.parameters(), kept=kept)
"""
MADE = [
    "d = tempfile.mkdtemp(prefix=prefix)",
    "d = pathlib.Path(tempfile.mkdtemp(prefix=prefix))",
    "held = tempfile.TemporaryDirectory(prefix=prefix)\nd = held.name",
]


@pytest.mark.parametrize("made", MADE)
def test_a_directory_that_is_still_there_is_used_again(jobs: Runner, made: str) -> None:
    said = jobs.same(DIRECTORY.replace("MADE", made).replace("GONE", "False"), 1, "0:8:before_seal")
    assert "not restored" not in said, said[-3000:]


@pytest.mark.parametrize("made", MADE)
def test_one_that_is_gone_stays_the_restarted_scripts(jobs: Runner, made: str) -> None:
    said = jobs.same(DIRECTORY.replace("MADE", made).replace("GONE", "True"), 1, "0:8:before_seal")
    assert " is gone: the restarted script's " in said, said[-3000:]


FILE = """
import tempfile
spool = MADE
spool.write("head\\n")
model = torch.nn.Linear(4, 2)
opt = torch.optim.SGD(model.parameters(), lr=0.05)
for step in range(12):
    opt.zero_grad()
    model(torch.randn(3, 4)).square().mean().backward()
    opt.step()
    if WRITES:
        spool.write(f"{step},")
spool.seek(0)
final(*model.parameters(), read=spool.read())
"""
FILES = ["tempfile.TemporaryFile('w+')", "tempfile.NamedTemporaryFile('w+')"]


@pytest.mark.parametrize("made", FILES)
def test_what_is_written_to_a_temporary_file_is_named(jobs: Runner, made: str) -> None:
    said = jobs.run(FILE.replace("MADE", made).replace("WRITES", "True"), 1, "0:8:before_seal")
    assert "spool" in said.partition("not restorable")[2].partition("\n")[0], said[-3000:]


@pytest.mark.parametrize("made", FILES)
def test_a_temporary_file_as_at_first_is_not(jobs: Runner, made: str) -> None:
    said = jobs.same(FILE.replace("MADE", made).replace("WRITES", "False"), 1, "0:8:before_seal")
    assert "not restorable" not in said, said[-3000:]


def test_a_spooled_file_in_memory_comes_back(jobs: Runner) -> None:
    made = "tempfile.SpooledTemporaryFile(max_size=1 << 20, mode='w+')"
    jobs.same(FILE.replace("MADE", made).replace("WRITES", "True"), 1, "0:8:before_seal")


def test_one_that_has_become_a_file_is_named(jobs: Runner) -> None:
    made = "tempfile.SpooledTemporaryFile(max_size=8, mode='w+')"
    said = jobs.run(FILE.replace("MADE", made).replace("WRITES", "True"), 1, "0:8:before_seal")
    assert "spool" in said.partition("not restorable")[2].partition("\n")[0], said[-3000:]
