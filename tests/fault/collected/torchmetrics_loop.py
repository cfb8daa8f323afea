# torchmetrics: a collection, a mean and an EMA-like tracker, updated in each step and reset in each epoch.
import torchmetrics
from torchmetrics.classification import MulticlassAccuracy, MulticlassConfusionMatrix

data = TensorDataset(torch.arange(20), torch.randn(20, 4), torch.randint(3, (20,)))
loader = DataLoader(data, 4, shuffle=True)
model = DDP(nn.Linear(4, 3))
optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
metrics = torchmetrics.MetricCollection({"acc": MulticlassAccuracy(3), "confusion": MulticlassConfusionMatrix(3)})
mean, running = torchmetrics.MeanMetric(), torchmetrics.aggregation.CatMetric()
tracker = torchmetrics.MetricTracker(MulticlassAccuracy(3))
step, results = 0, []
for epoch in range(3):
    tracker.increment()
    for ids, x, y in loader:
        out = model(x)
        loss = F.cross_entropy(out, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        metrics.update(out.detach(), y)
        mean.update(loss.detach())
        running.update(loss.detach())
        tracker.update(out.detach(), y)
        step += 1
        say(step, loss, ids)
    results.append({name: value.tolist() for name, value in metrics.compute().items()})
    results.append(mean.compute().item())
    metrics.reset()
final(model=model.state_dict(), results=results, running=running.compute(), tracked=tracker.compute_all().tolist(), mean=mean.compute())
dist.destroy_process_group()
