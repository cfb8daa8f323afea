"""A resume silently restored filters of loggers and a `LoggerAdapter` as they were at first."""

from __future__ import annotations

from tests.support.killed import Runner

SCRIPT = """
import logging
class Count(logging.Filter):
    def __init__(self):
        super().__init__()
        self.n, self.seen = 0, set()
    def filter(self, record):
        self.n += 1
        is_new = record.args not in self.seen
        self.seen.add(record.args)
        return is_new
logging.getLogger("train.steps").addFilter(Count())
handler = logging.NullHandler()
handler.addFilter(Count())
logging.getLogger("train").addHandler(handler)
logging.getLogger("train").propagate = False
adapter = logging.LoggerAdapter(logging.getLogger("train"), {"n": 0})
del handler
model = torch.nn.Linear(4, 2)
opt = torch.optim.SGD(model.parameters(), lr=0.05)
for step in range(12):
    opt.zero_grad()
    model(torch.randn(3, 4)).square().mean().backward()
    opt.step()
    adapter.extra["n"] += 1
    logging.getLogger("train.steps").error("step %d", step // 2)
both = [*logging.getLogger("train.steps").filters, *logging.getLogger("train").handlers[0].filters]
final(*model.parameters(), extra=adapter.extra, filters=[(one.n, sorted(one.seen)) for one in both])
"""


def test_what_they_keep_comes_back(jobs: Runner) -> None:
    said = jobs.same(SCRIPT, 1, "0:8:before_seal")
    assert "not restorable" not in said, said[-3000:]


REMOVED = """
import logging
class Count(logging.Filter):
    n = 0
    def filter(self, record):
        self.n += 1
        return True
count = Count()
log = logging.getLogger("train")
log.addFilter(count)
model = torch.nn.Linear(4, 2)
opt = torch.optim.SGD(model.parameters(), lr=0.05)
for step in range(12):
    opt.zero_grad()
    model(torch.randn(3, 4)).square().mean().backward()
    opt.step()
    if step == 4:
        log.removeFilter(count)
    log.debug("step %d", step)
final(*model.parameters())
"""


def test_that_the_last_one_is_gone_is_said(jobs: Runner) -> None:
    said = jobs.run(REMOVED, 1, "0:8:before_seal")
    assert "removed after the first step" in said, said[-3000:]
