# Optimizers of other packages: Lookahead around Lion, Prodigy, SAM-like two passes, an EMA of ema-pytorch.
from ema_pytorch import EMA
from lion_pytorch import Lion
from prodigyopt import Prodigy
from pytorch_optimizer import Lookahead

data = TensorDataset(torch.arange(20), torch.randn(20, 4), torch.randn(20, 1))
loader = DataLoader(data, 4, shuffle=True)
body, head = nn.Sequential(nn.Linear(4, 8), nn.Tanh()), nn.Linear(8, 1)
model = DDP(nn.Sequential(body, head))
first = Lookahead(Lion(body.parameters(), lr=0.01), k=3)
second = Prodigy(head.parameters(), lr=1.0)
ema = EMA(head, beta=0.9, update_after_step=2, update_every=2)
step = 0
for epoch in range(3):
    for ids, x, y in loader:
        loss = F.mse_loss(model(x), y)
        first.zero_grad()
        second.zero_grad()
        loss.backward()
        first.step()
        second.step()
        ema.update()
        step += 1
        say(step, loss, ids)
final(model=model.state_dict(), second=second.state_dict(), first=first.optimizer.state_dict(), ema=ema.state_dict())
dist.destroy_process_group()
