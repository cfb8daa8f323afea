# ranks: 2; kills: 3 8 13
# Evaluation after each epoch with a loader of its own, ReduceLROnPlateau, early stopping, a copy of
# the best weights.
import copy

import torch
import torch.distributed as dist
from digest import digest
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset, random_split


@torch.no_grad()
def evaluate(model, loader):
    model.eval()
    total, count = 0.0, 0
    for _, x, y in loader:
        total += (model(x) - y).square().sum().item()
        count += len(x)
    model.train()
    return total / count


def main():
    dist.init_process_group("reft")
    rank = dist.get_rank()
    torch.manual_seed(21)
    data = TensorDataset(torch.arange(40), torch.randn(40, 4), torch.randn(40, 1))
    train, held_out = random_split(data, [24, 16])
    sampler = DistributedSampler(train)
    train_loader, eval_loader = DataLoader(train, 3, sampler=sampler), DataLoader(held_out, 8)
    model = DDP(nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 1)))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.3)
    best, best_state, bad_epochs, history = float("inf"), None, 0, []
    for epoch in range(10):
        sampler.set_epoch(epoch)
        for ids, x, y in train_loader:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            print(f"r{rank} {epoch} loss {loss.item().hex()} ids {ids.tolist()}", flush=True)
        score = evaluate(model.module, eval_loader)
        scheduler.step(score)
        history.append((epoch, score, optimizer.param_groups[0]["lr"]))
        print(f"r{rank} {epoch} evaluation {score.hex()} best {best.hex()} bad {bad_epochs}", flush=True)
        if score < best:
            best, best_state, bad_epochs = score, copy.deepcopy(model.module.state_dict()), 0
        else:
            bad_epochs += 1
            if bad_epochs == 3:
                print(f"r{rank} stopping early at {epoch}", flush=True)
                break
    model.module.load_state_dict(best_state)
    print(f"r{rank} final {history} best {best.hex()} {digest(best_state)}", flush=True)
    print(f"r{rank} final {digest(model, optimizer, scheduler)}", flush=True)
    dist.destroy_process_group()


main()
