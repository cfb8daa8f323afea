# state: lists, dicts and arrays that a `collate_fn` or dataset fills inside workers
# result: start from scratch
# reported: by a verified resume
import torch
from torch.utils.data import DataLoader, Dataset
from toy import begin, end, parts, say, train


class Remembering(Dataset):
    def __init__(self):
        self.x, self.seen = torch.randn(24, 4), []

    def __len__(self):
        return 24

    def __getitem__(self, i):
        self.seen.append(i)
        return self.x[i] * len(self.seen)


rank = begin()
model, optimizer = parts()
for step, x in enumerate(DataLoader(Remembering(), 2, num_workers=1)):
    say(rank, step, train(model, optimizer, x).hex())
end(rank, model, optimizer)
