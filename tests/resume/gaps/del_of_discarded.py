# state: what `__del__` of objects changes (a pool to which they return their slot), if the objects of the discarded iteration end when the loop is put back
# result: is changed once more
# reported: by a verified resume
import torch
from toy import begin, end, parts, say, train


class Pool:
    def __init__(self):
        self.free = list(range(6))


class Slot:
    def __init__(self, pool):
        self.pool, self.index = pool, pool.free.pop(0)

    def __del__(self):
        self.pool.free.append(self.index)


rank = begin()
model, optimizer = parts()
pool, held = Pool(), []
for step in range(12):
    held.append(Slot(pool))
    loss = train(model, optimizer, torch.randn(8, 4) + 0.1 * held[-1].index)
    if len(held) > 3:
        held.pop(0)
    say(rank, step, loss.hex(), [slot.index for slot in held], pool.free)
end(rank, model, optimizer)
