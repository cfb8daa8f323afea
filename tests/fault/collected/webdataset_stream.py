# webdataset: samples from tar files, shuffled in a buffer, batched by a loader.
import io
import tarfile

import webdataset as wds

folder = tempfile.mkdtemp()
for shard in range(3):
    with tarfile.open(f"{folder}/{shard}.tar", "w") as tar:
        for i in range(8):
            for suffix, text in (("cls", str(i % 3)), ("id", str(8 * shard + i))):
                entry = tarfile.TarInfo(f"{8 * shard + i:03}.{suffix}")
                entry.size = len(text)
                tar.addfile(entry, io.BytesIO(text.encode()))
shards = [f"{folder}/{shard}.tar" for shard in range(3)]


def decode(sample):
    return torch.tensor(int(sample["id"])), torch.full((4,), float(sample["id"])) / 24, torch.tensor(int(sample["cls"]))


dataset = wds.WebDataset(shards, shardshuffle=3, nodesplitter=None, seed=3).shuffle(5).map(decode).batched(4, partial=False)
loader = wds.WebLoader(dataset, batch_size=None, num_workers=0)
model = DDP(nn.Linear(4, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
step = 0
for epoch in range(3):
    for ids, x, y in loader:
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        say(step, loss, ids)
        if step == 12:
            break
    if step == 12:
        break
final(model=model.state_dict(), step=step)
dist.destroy_process_group()
