# ranks: 2; kills: 2 3 5
# GAN whose generator trains in every third iteration only, on samples that were computed before the
# discriminator's step.
import random

import torch
import torch.distributed as dist
import torch.nn.functional as F
from digest import digest
from torch import nn

dist.init_process_group("reft")
rank = dist.get_rank()
torch.manual_seed(3)
generator = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 2))
critic = nn.Sequential(nn.Linear(2, 16), nn.LeakyReLU(), nn.Linear(16, 1))
opt_g = torch.optim.Adam(generator.parameters(), lr=1e-3)
opt_c = torch.optim.RMSprop(critic.parameters(), lr=1e-3)
torch.manual_seed(rank)
random.seed(rank)


def average(model):
    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()


n, replay = 0, []
while n < 20:
    real = torch.randn(8, 2) * random.uniform(0.9, 1.1)
    fake = generator(torch.randn(8, 4))
    opt_c.zero_grad()
    c_loss = F.softplus(-critic(real)).mean() + F.softplus(critic(fake.detach())).mean()
    c_loss.backward()
    average(critic)
    opt_c.step()
    if n % 3 == 0:
        opt_g.zero_grad()
        g_loss = F.softplus(-critic(fake)).mean()
        g_loss.backward()
        average(generator)
        opt_g.step()
    replay = [*replay[-4:], fake[0].detach().clone()]
    n += 1
    print(f"r{rank} {n} c {c_loss.item().hex()} g {g_loss.item().hex()} {digest(replay)}", flush=True)
print(f"r{rank} final {digest(generator, critic, opt_g, opt_c)}", flush=True)
dist.destroy_process_group()
