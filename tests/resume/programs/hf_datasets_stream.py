# ranks: 2; kills: 2 6 10
# A streamed Hugging Face dataset with a shuffle buffer, mapped, split by node, behind a DataLoader.

import torch
import torch.distributed as dist
from datasets import IterableDataset
from datasets.distributed import split_dataset_by_node
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader

from tests.resume.scripts.digest import digest


def rows(shards):
    for shard in shards:
        for number in range(6):
            yield {"id": shard * 10 + number}


def add_feature(row):
    return row | {"x": [row["id"] / 40, 1.0]}


def main():
    dist.init_process_group("reft")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(14)
    stream = IterableDataset.from_generator(rows, gen_kwargs={"shards": list(range(6))})
    stream = split_dataset_by_node(stream.map(add_feature).shuffle(seed=5, buffer_size=7), rank, world).with_format(
        "torch"
    )
    model = DDP(nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(2):
        stream.set_epoch(epoch)
        for batch in DataLoader(stream, batch_size=3):
            loss = model(batch["x"]).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            print(f"r{rank} {epoch} loss {loss.item().hex()} ids {batch['id'].tolist()}", flush=True)
    print(f"r{rank} final {digest(model, optimizer)}", flush=True)
    dist.destroy_process_group()


main()
