# schedule-free AdamW with train and eval modes around an evaluation in each epoch.
import schedulefree

data = TensorDataset(torch.arange(20), torch.randn(20, 4), torch.randn(20, 1))
loader = DataLoader(data, 4, shuffle=True)
model = DDP(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)))
optimizer = schedulefree.AdamWScheduleFree(model.parameters(), lr=0.02, warmup_steps=4)
step, best, evaluated = 0, float("inf"), []
for epoch in range(3):
    model.train()
    optimizer.train()
    for ids, x, y in loader:
        loss = F.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        say(step, loss, ids)
    model.eval()
    optimizer.eval()
    with torch.no_grad():
        evaluated.append(F.mse_loss(model(data.tensors[1]), data.tensors[2]).item())
    best = min(best, evaluated[-1])
final(model=model.state_dict(), opt=optimizer.state_dict(), evaluated=evaluated, best=best)
dist.destroy_process_group()
