# ranks: 2; kills: 2 5 9
# A critic that steps at every iteration and a generator that steps at every third one, each with a
# schedule of its own.
import torch
import torch.distributed as dist
from digest import digest
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset

dist.init_process_group("reft")
rank = dist.get_rank()
torch.manual_seed(12)
generator = DDP(nn.Sequential(nn.Linear(3, 8), nn.LeakyReLU(), nn.Linear(8, 2)))
critic = DDP(nn.Sequential(nn.Linear(2, 8), nn.LeakyReLU(), nn.Linear(8, 1)), broadcast_buffers=False)
opt_g = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.0, 0.9))
opt_c = torch.optim.Adam(critic.parameters(), lr=1e-3, betas=(0.0, 0.9))
schedule_g = torch.optim.lr_scheduler.StepLR(opt_g, 2, 0.5)
real = TensorDataset(torch.arange(24), torch.randn(24, 2) + 2)
torch.manual_seed(30 + rank)
loader = DataLoader(real, batch_size=4, shuffle=True)
generated = 0
for epoch in range(2):
    for i, (ids, x) in enumerate(loader):
        opt_c.zero_grad()
        fake = generator(torch.randn(len(x), 3))
        loss = critic(fake.detach()).mean() - critic(x).mean()
        loss.backward()
        opt_c.step()
        print(f"r{rank} {epoch} {i} critic {loss.item().hex()} ids {ids.tolist()}", flush=True)
        if i % 3 == 2:
            opt_g.zero_grad()
            g_loss = -critic(generator(torch.randn(len(x), 3))).mean()
            g_loss.backward()
            opt_g.step()
            schedule_g.step()
            generated += 1
            print(f"r{rank} {epoch} {i} generator {g_loss.item().hex()} of {generated}", flush=True)
print(f"r{rank} final {generated} {schedule_g.get_last_lr()}", flush=True)
print(f"r{rank} final {digest(generator, critic, opt_g, opt_c)}", flush=True)
dist.destroy_process_group()
