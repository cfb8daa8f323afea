# state: objects, and closures' variables, that the loop changes during an epoch and that a `collate_fn` or dataset reads inside workers (numbers, strings, and small lists and dicts of them among the globals of your modules come back as they were when the epoch began)
# result: workers of a resumed job start at the resume, and copy what the objects hold then
# reported: by a verified resume
import torch
from torch.utils.data import DataLoader, TensorDataset
from toy import begin, end, parts, say, train


class Noise:
    def __init__(self):
        self.scales = [1.0]


def main():
    rank = begin()
    model, optimizer = parts()
    noise = Noise()

    def collate(items):
        return torch.stack([x for (x,) in items]) * noise.scales[-1]

    loader = DataLoader(TensorDataset(torch.randn(24, 4)), 2, collate_fn=collate, num_workers=1)
    for step, x in enumerate(loader):
        loss = train(model, optimizer, x)
        noise.scales.append(noise.scales[-1] * 1.5)
        say(rank, step, loss.hex(), len(noise.scales))
    end(rank, model, optimizer)


main()
