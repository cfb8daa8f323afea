# ranks: 2; kills: 3 6 9
# A loop with Accelerate: prepare(), accumulate(), gather_for_metrics(), clip_grad_norm_(). On the
# CPU it takes no backend but gloo by its arguments, and uses a process group that is already there.

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.resume.scripts.digest import digest


def main():
    torch.distributed.init_process_group(backend="reft")
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    rank = accelerator.process_index
    set_seed(3)
    data = TensorDataset(torch.arange(48), torch.randn(48, 5), torch.randint(3, (48,)))
    model = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=12)
    loader = DataLoader(data, batch_size=3, shuffle=True)
    held_out = DataLoader(TensorDataset(torch.randn(10, 5), torch.randint(3, (10,))), batch_size=4)
    model, optimizer, loader, held_out, scheduler = accelerator.prepare(model, optimizer, loader, held_out, scheduler)
    completed = 0
    for epoch in range(3):
        model.train()
        total = 0.0
        for step, (ids, x, y) in enumerate(loader):
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(x), y)
                total += loss.detach().float().item()
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                completed += 1
            print(f"r{rank} {epoch} {step} {completed} loss {loss.item().hex()} ids {ids.tolist()}", flush=True)
        model.eval()
        right = 0
        for x, y in held_out:
            with torch.no_grad():
                found = model(x).argmax(-1)
            found, y = accelerator.gather_for_metrics((found, y))
            right += (found == y).sum().item()
        print(f"r{rank} end of {epoch} total {total.hex()} right {right}", flush=True)
    print(f"r{rank} final {completed} {digest(model, optimizer.optimizer, scheduler.scheduler)}", flush=True)
    accelerator.end_training()


if __name__ == "__main__":
    main()
