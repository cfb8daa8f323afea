# ranks: 2; kills: 2 5 9
# Two models, two optimizers stepped in turn, noise from the global generator, ids drawn without
# replacement.
import torch
import torch.distributed as dist
from digest import digest
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset

dist.init_process_group("reft")
rank = dist.get_rank()
torch.manual_seed(11)
generator = DDP(nn.Sequential(nn.Linear(3, 8), nn.LeakyReLU(), nn.Linear(8, 2)))
discriminator = DDP(nn.Sequential(nn.Linear(2, 8), nn.LeakyReLU(), nn.Linear(8, 1)), broadcast_buffers=False)
opt_g = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.999))
opt_d = torch.optim.Adam(discriminator.parameters(), lr=1e-3, betas=(0.5, 0.999))
real = TensorDataset(torch.arange(20), torch.randn(20, 2) + 2)
torch.manual_seed(20 + rank)
loader = DataLoader(real, batch_size=4, shuffle=True)
criterion = nn.BCEWithLogitsLoss()
d_losses, g_losses = [], []
for epoch in range(2):
    for ids, x in loader:
        opt_d.zero_grad()
        fake = generator(torch.randn(len(x), 3))
        d_loss = criterion(discriminator(x), torch.ones(len(x), 1))
        d_loss = d_loss + criterion(discriminator(fake.detach()), torch.zeros(len(x), 1))
        d_loss.backward()
        opt_d.step()

        opt_g.zero_grad()
        g_loss = criterion(discriminator(fake), torch.ones(len(x), 1))
        g_loss.backward()
        opt_g.step()

        d_losses.append(d_loss.item())
        g_losses.append(g_loss.item())
        print(f"r{rank} {epoch} d {d_loss.item().hex()} g {g_loss.item().hex()} ids {ids.tolist()}", flush=True)
print(f"r{rank} final {[v.hex() for v in d_losses]} {[v.hex() for v in g_losses]}", flush=True)
print(f"r{rank} final {digest(generator, discriminator, opt_g, opt_d)}", flush=True)
dist.destroy_process_group()
