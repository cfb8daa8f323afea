"""What a script deletes came back at a resume, without a word: attributes of torch's modules, the last
attribute of a function, variables of closures, keys of parameter groups, attributes of schedulers."""

from __future__ import annotations

from tests.support.killed import Runner

SCRIPT = """
def once():
    first = True
    def call():
        nonlocal first
        try:
            first
        except NameError:
            return 0
        del first
        return 1
    return call

def flagged():
    return getattr(flagged, "flag", 0)

def again():
    return dict(vars(again))

flagged.flag, again.first = 1, 1
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
model.warm, model[1].scale, model[0].late = 3, 2.0, 1
opt = torch.optim.SGD(model.parameters(), lr=0.05)
opt.param_groups[0]["warm"] = True
sched = torch.optim.lr_scheduler.StepLR(opt, 100)
sched.tag = "first"
call, called = once(), 0
for k in range(12):
    opt.zero_grad()
    scale = getattr(model[1], "scale", 1.0)
    (model(torch.full((3, 4), 0.1 * k)) * scale).square().mean().backward()
    opt.step()
    if k == 2:
        del model.warm, model[1].scale, flagged.flag, again.first
        del opt.param_groups[0]["warm"], sched.tag
    if k == 4:
        again.second = 2
        model[0].late = 4
    if k in (1, 10):
        called += call()
    if k == 9 and hasattr(model, "warm"):
        opt.param_groups[0]["lr"] = 0.5
final(
    *model.parameters(), called=called, flag=flagged(), again=again(), late=model[0].late,
    group=sorted(opt.param_groups[0]), tag=hasattr(sched, "tag"),
)
"""


def test_it_stays_deleted(jobs: Runner) -> None:
    said = jobs.same(SCRIPT, 1, "0:8:before_seal")
    assert "not restor" not in said, said[-3000:]


def test_it_is_there_before_it_is_deleted(jobs: Runner) -> None:
    jobs.same(SCRIPT, 1, "0:2:before_seal")
