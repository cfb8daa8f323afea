# Lightning: manual optimization with two optimizers, callbacks that keep state, early stopping.
import warnings

import lightning as L
from lightning.pytorch.callbacks import Callback, EarlyStopping
from lightning.pytorch.strategies import DDPStrategy

warnings.filterwarnings("ignore")


class Keeps(Callback):
    def __init__(self):
        self.count, self.recent = 0, collections.deque(maxlen=3)

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.count += 1
        self.recent.append(module.last)
        say(self.count, module.last, batch[0])


class Two(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.a, self.b, self.last, self.turn = nn.Linear(4, 4), nn.Linear(4, 1), 0.0, 0

    def training_step(self, batch, batch_idx):
        first, second = self.optimizers()
        _, x, y = batch
        loss = F.mse_loss(self.b(torch.tanh(self.a(x))), y)
        first.zero_grad()
        second.zero_grad()
        self.manual_backward(loss)
        first.step()
        second.step()
        self.turn += 1
        self.last = loss.item() * (1 + 0.01 * self.turn)
        self.log("loss", loss, sync_dist=True)

    def on_train_epoch_end(self):
        self.lr_schedulers().step()

    def configure_optimizers(self):
        first, second = torch.optim.SGD(self.a.parameters(), lr=0.05, momentum=0.9), torch.optim.Adam(self.b.parameters(), lr=0.01)
        return [first, second], [torch.optim.lr_scheduler.StepLR(first, 1, 0.7)]


L.seed_everything(5, verbose=False)
data = TensorDataset(torch.arange(40), torch.randn(40, 4), torch.randn(40, 1))
model, keeps = Two(), Keeps()
trainer = L.Trainer(accelerator="cpu", devices=2, strategy=DDPStrategy(process_group_backend=None if os.environ.get("REFT_DISABLE") else "reft"),
                    max_epochs=3, enable_checkpointing=False, logger=False, enable_progress_bar=False, enable_model_summary=False,
                    callbacks=[keeps, EarlyStopping("loss", patience=9, check_on_train_epoch_end=True)])  # fmt: skip
trainer.fit(model, DataLoader(data, 4, shuffle=True))
final(model=model.state_dict(), count=keeps.count, recent=list(keeps.recent), turn=model.turn, stop=[trainer.callbacks[1].wait_count, trainer.callbacks[1].best_score])
