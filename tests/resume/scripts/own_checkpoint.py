# ranks: 2; kills: 3 6 9
# A script that saves and loads a checkpoint by itself every few steps; the file is named after the
# launcher's run.
import os
import tempfile

import torch
import torch.distributed as dist
from digest import digest
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def main():
    dist.init_process_group(backend="reft")
    rank = dist.get_rank()
    path = os.path.join(tempfile.gettempdir(), f"own-{os.environ['REFT_JOB_ID']}.pt")
    torch.manual_seed(41)
    model = DDP(nn.Linear(4, 4))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    start = 0
    if os.path.exists(path):
        saved = torch.load(path)
        model.module.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        start = saved["step"]
    torch.manual_seed(42 + rank)
    for step in range(start, 10):
        x = torch.randn(3, 4)
        loss = (model(x) - x.flip(1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"r{rank} {step} loss {loss.item().hex()} ids {x[0, 0].item().hex()}", flush=True)
        if step % 4 == 3:
            if rank == 0:
                state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}
                torch.save(state, path + ".new")
                os.replace(path + ".new", path)
            dist.barrier()
    print(f"r{rank} final {step} {digest(model, optimizer)}", flush=True)
    dist.barrier()
    if rank == 0:
        os.unlink(path)
    dist.destroy_process_group()


main()
