# torchdata: a pipeline of nodes behind its Loader.
from torchdata.nodes import Batcher, Loader, Mapper, SamplerWrapper

data = torch.randn(20, 4)
sampler = torch.utils.data.RandomSampler(range(20), generator=torch.Generator().manual_seed(3 + RANK))
node = Batcher(Mapper(SamplerWrapper(sampler), lambda i: (i, data[i])), 4)
loader = Loader(node)
model = DDP(nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
step = 0
for epoch in range(3):
    for rows in loader:
        ids, x = torch.tensor([r[0] for r in rows]), torch.stack([r[1] for r in rows])
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        say(step, loss, ids)
final(model=model.state_dict())
dist.destroy_process_group()
