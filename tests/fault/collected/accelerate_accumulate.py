# Accelerate: gradient accumulation, a prepared scheduler, gathered metrics, a seeded sampler.
from accelerate import Accelerator
from accelerate.utils import set_seed

set_seed(5)
accelerator = Accelerator(gradient_accumulation_steps=2, cpu=True)
data = TensorDataset(torch.arange(48), torch.randn(48, 4), torch.randn(48, 1))
model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.1), nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1 / (1 + n))
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, DataLoader(data, 4, shuffle=True), scheduler)
step, total = 0, []
for epoch in range(3):
    for ids, x, y in loader:
        with accelerator.accumulate(model):
            loss = F.mse_loss(model(x), y)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        step += 1
        total.append(accelerator.gather(loss.detach()).mean().item())
        say(step, loss, ids)
final(model=model.state_dict(), opt=optimizer.state_dict(), total=total, lr=scheduler.get_last_lr())
dist.destroy_process_group()
