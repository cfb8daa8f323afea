# state: an item of a dataset of more than 256 items (or of any other object that reft does not inspect), if a variable refers to the item and the loop writes into it
# result: the variable is restored with a separate copy; later writes do not change the dataset
# reported: after the first snapshot; by a verified resume
import torch
from torch.utils.data import DataLoader, Dataset
from toy import begin, end, parts, say, train


class Counted(Dataset):
    def __init__(self):
        self.items = [{"uses": 0, "x": torch.full((4,), i / 300)} for i in range(300)]

    def __len__(self):
        return 12

    def __getitem__(self, i):
        return self.items[0]["uses"], self.items[i]["x"]


rank = begin()
model, optimizer = parts()
data = Counted()
first = data.items[0]
for step, (uses, x) in enumerate(DataLoader(data, 1)):
    loss = train(model, optimizer, x * (1 + uses))
    first["uses"] += 1
    say(rank, step, uses.item(), loss.hex())
end(rank, model, optimizer)
