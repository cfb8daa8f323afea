# Ignite: an engine with handlers, metrics, early stopping and a progress counter, as in its MNIST example.
from ignite.engine import Engine, Events
from ignite.handlers import EarlyStopping, EMAHandler, TerminateOnNan
from ignite.handlers.param_scheduler import CosineAnnealingScheduler
from ignite.metrics import Accuracy, RunningAverage

data = TensorDataset(torch.arange(20), torch.randn(20, 4), torch.randint(3, (20,)))
loader = DataLoader(data, 4, shuffle=True)
model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 3))
ddp = DDP(model)
optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)


def train_step(engine, batch):
    ids, x, y = batch
    model.train()
    optimizer.zero_grad()
    out = ddp(x)
    loss = F.cross_entropy(out, y)
    loss.backward()
    optimizer.step()
    say(engine.state.iteration, loss, ids)
    return {"loss": loss.item(), "y_pred": out.detach(), "y": y}


trainer = Engine(train_step)
RunningAverage(output_transform=lambda o: o["loss"]).attach(trainer, "loss")
accuracy = Accuracy(output_transform=lambda o: (o["y_pred"], o["y"]))
accuracy.attach(trainer, "accuracy")
ema = EMAHandler(model, momentum=0.1)
ema.attach(trainer, name="ema", event=Events.ITERATION_COMPLETED)
scheduler = CosineAnnealingScheduler(optimizer, "lr", 0.1, 0.01, 5)
trainer.add_event_handler(Events.ITERATION_STARTED, scheduler)
trainer.add_event_handler(Events.ITERATION_COMPLETED, TerminateOnNan(output_transform=lambda o: o["loss"]))
stopper = EarlyStopping(patience=5, score_function=lambda e: -e.state.metrics["loss"], trainer=trainer)
trainer.add_event_handler(Events.EPOCH_COMPLETED, stopper)
seen = []


@trainer.on(Events.EPOCH_COMPLETED)
def log(engine):
    seen.append((engine.state.epoch, engine.state.metrics["loss"], engine.state.metrics["accuracy"]))


@trainer.on(Events.ITERATION_COMPLETED(every=3))
def every_third(engine):
    seen.append(engine.state.iteration)


trainer.run(loader, max_epochs=3)
final(model=model.state_dict(), opt=optimizer.state_dict(), ema=ema.ema_model.state_dict(), seen=seen,
      stop=[stopper.counter, stopper.best_score], metrics=dict(trainer.state.metrics), lr=optimizer.param_groups[0]["lr"])
dist.destroy_process_group()
