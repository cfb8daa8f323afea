"""A job trains, is killed and resumes while somebody else, who lacks its secret, writes to its store
all that reft reads there."""

from __future__ import annotations

from pathlib import Path

from tests.support.restarts import finals, resumed_step, run

# A child of rank 1, with a connection of its own. It forges what is not there yet, so that ranks
# find it first, and what a commit or a report would read.
OUTSIDER = """
import pickle
class Bomb:
    def __reduce__(self):
        return os.system, ("touch " + os.environ["BOMB"],)
def outsider(parent):
    store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=False)
    names = ["secret/go", "agent/0", "table/0", "table/1", "objects/0", "objects/1"]
    for name in ("identity", "inventory", "match", "match/1", "verify"):
        names += [name + end for end in ("/0", "/1", "/node/0", "/job")]
    values = [pickle.dumps(Bomb()), b"[" * 200_000, b"", b'["{}", {}]', b"go", b"node-0"]
    done = set()
    while os.getppid() == parent:
        for key in store.list_keys():
            prefix, there, _ = key.partition("/reft/agree/answer/1")
            if not there:
                continue
            number = store.get(key).decode().split()[1]
            for i, name in enumerate(names):
                forged = f"{prefix}/reft/{number}//{name}"
                if forged not in done and not store.check([forged]):
                    store.set(forged, values[(i + len(done)) % len(values)])
                done.add(forged)
        time.sleep(0.001)
    os._exit(0)
if os.environ["RANK"] == "1":
    me = os.getpid()
    if os.fork() == 0:
        outsider(me)
"""
TRAIN = """
torch.manual_seed(7)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
for step in range(1, 9):
    optimizer.zero_grad()
    model(torch.randn(2, 4)).square().mean().backward()
    optimizer.step()
    scheduler.step()
    maybe_kill(step, 0)
final(*model.parameters())
"""


def test_a_job_survives_an_outsider_that_writes_to_its_store(tmp_path: Path) -> None:
    bomb = tmp_path / "bomb"
    undisturbed = finals(run(TRAIN, 2))
    said = run(TRAIN, 2, kill=5, before=OUTSIDER, BOMB=str(bomb))
    assert not bomb.exists()
    assert resumed_step(said) in (4, 5), said  # the other rank may not have sealed step 5
    assert finals(said) == undisturbed and len(undisturbed) == 2
    assert "ignored a value of the job's store" in said
