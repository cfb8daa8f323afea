"""A resume wrote numbers that `id` had given in the process that died into lists, tuples, dicts and
keys: the script then took its own parameters for others, without a word."""

from __future__ import annotations

from tests.support.killed import Runner

SCRIPT = """
import collections
class Plain: pass
plain = Plain()
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
opt = torch.optim.SGD(model.parameters(), lr=0.05)
weight = model[1].weight
plain.ids = list(map(id, model[1].parameters()))
plain.pair, plain.deep = (id(weight), "head"), {"w": [(1, id(weight))]}
plain.queue, plain.fixed = collections.deque([id(weight)]), frozenset([id(weight)])
plain.keys, plain.names = {(0, id(weight)): 1}, {id(p): n for n, p in model.named_parameters()}
plain.hashes, plain.mine = {hash(plain): 1}, id(model[0].weight)
far = 9_000_000_000_000_000
plain.counts = [far, far + 1, None, 1 << 80]

def look():
    return (
        id(weight) in plain.ids, plain.pair[0] == id(weight), plain.deep["w"][0][1] == id(weight),
        plain.queue[0] == id(weight), id(weight) in plain.fixed, (0, id(weight)) in plain.keys,
        [plain.names.get(id(p)) for p in model.parameters()], hash(plain) in plain.hashes,
        plain.mine == id(model[0].weight), plain.counts,
    )

for k in range(12):
    opt.zero_grad()
    model(torch.full((3, 4), 0.1 * k)).square().mean().backward()
    opt.step()
    if k == 4:
        plain.mine = id(weight)
    if k == 5:
        plain.mine = id(model[0].weight)
        plain.queue.append(id(model[0].bias))
    if k % 4 == 3:
        with torch.no_grad():
            for p in model.parameters():
                if id(p) not in plain.ids:
                    p.mul_(0.9)
final(*model.parameters(), look=look(), queue=[plain.names[i] for i in plain.queue])
"""


def test_they_are_those_of_the_new_process(jobs: Runner) -> None:
    said = jobs.same(SCRIPT, 1, "0:8:before_seal")
    assert "False" not in next(line for line in said.splitlines() if "FINAL" in line), said[-2000:]
