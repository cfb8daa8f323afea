# state: a list of more than 2,097,152 items or an array of more than 16 MiB, in a dataset or anywhere else but in a variable of a function on the path, if single items are replaced while its length stays; a change inside an item of a list of more than 256 items
# result: keeps the values of the restarted script; `reft.register` saves it
# reported: after the first snapshot; by a verified resume
import torch
from torch.utils.data import DataLoader, Dataset
from toy import begin, end, parts, say, train


class Table(Dataset):
    def __init__(self):
        self.weights = [1.0] * 3_000_000
        self.counts = [[0] for _ in range(300)]

    def __len__(self):
        return 12

    def __getitem__(self, i):
        return torch.full((4,), self.weights[1_234_567] + self.counts[7][0])


rank = begin()
model, optimizer = parts()
data = Table()
for step, x in enumerate(DataLoader(data, 1)):
    loss = train(model, optimizer, x)
    data.weights[1_234_567] += 0.5
    data.counts[7][0] += 1
    say(rank, step, loss.hex())
end(rank, model, optimizer)
