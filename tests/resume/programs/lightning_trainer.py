# ranks: 2; kills: 3 7 11
# Lightning's Trainer with DDP: validation each epoch, a scheduler per step, logged metrics.
import warnings

import lightning as L
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.resume.scripts.digest import digest

warnings.filterwarnings("ignore")


class Classifier(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 3))
        self.seen, self.last = [], []

    def training_step(self, batch, batch_idx):
        ids, x, y = batch
        loss = nn.functional.cross_entropy(self.net(x), y)
        self.log("train_loss", loss)
        self.seen.extend(ids.tolist())
        self.last = ids.tolist()
        return loss

    def on_train_batch_end(self, outputs, batch, batch_idx):
        where = f"{self.current_epoch} {batch_idx} {self.global_step}"
        print(f"r{self.global_rank} {where} loss {outputs['loss'].item().hex()} ids {self.last}", flush=True)

    def validation_step(self, batch, batch_idx):
        _, x, y = batch
        self.log("val_loss", nn.functional.cross_entropy(self.net(x), y), sync_dist=True)

    def on_validation_epoch_end(self):
        value = self.trainer.callback_metrics.get("val_loss", torch.zeros(())).item()
        print(f"r{self.global_rank} {self.current_epoch} {self.global_step} validation {value.hex()}", flush=True)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=20)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def main():
    L.seed_everything(5, verbose=False)
    data = TensorDataset(torch.arange(40), torch.randn(40, 6), torch.randint(3, (40,)))
    held_out = TensorDataset(torch.arange(8), torch.randn(8, 6), torch.randint(3, (8,)))
    model = Classifier()
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=DDPStrategy(process_group_backend="reft"),
        max_epochs=3,
        enable_checkpointing=False,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )
    trainer.fit(model, DataLoader(data, 4, shuffle=True), DataLoader(held_out, 4))
    rank = trainer.global_rank
    print(f"r{rank} final {trainer.global_step} {sorted(model.seen)}", flush=True)
    print(f"r{rank} final {digest(model, trainer.optimizers[0])}", flush=True)


if __name__ == "__main__":
    main()
