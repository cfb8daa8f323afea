# state: NaN as a key of a dict or a member of a set (NaN is equal to itself alone)
# result: is another NaN than that of a variable: it is not found any more
# reported: by a verified resume
import torch
from toy import begin, end, parts, say, train

if __name__ == "__main__":
    rank = begin()
    model, optimizer = parts()
    missing = float("nan")
    seen = {missing: 0}
    for step in range(12):
        loss = train(model, optimizer, torch.randn(8, 4))
        seen[missing] = seen.get(missing, 0) + 1
        say(rank, step, loss.hex(), list(seen.values()))
    end(rank, model, optimizer)
