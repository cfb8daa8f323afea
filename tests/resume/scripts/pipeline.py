# ranks: 2; kills: 2 5 8
# torch.distributed.pipelining, 1F1B over two stages, four micro-batches; only the last stage knows
# the loss.
import torch
import torch.distributed as dist
from digest import digest
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B


def main():
    dist.init_process_group("reft")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(70)
    parts = [nn.Sequential(nn.Linear(6, 8), nn.Tanh()), nn.Sequential(nn.Linear(8, 2))]
    module = parts[rank]
    example = torch.zeros(2, 6)
    stage = PipelineStage(
        module, rank, world, torch.device("cpu"), input_args=(example if rank == 0 else torch.zeros(2, 8),)
    )
    schedule = Schedule1F1B(stage, n_microbatches=4, loss_fn=nn.functional.mse_loss)
    optimizer = torch.optim.Adam(module.parameters(), lr=0.01)
    data = torch.Generator().manual_seed(71)
    order = []
    for step in range(9):
        ids = torch.randperm(64, generator=data)[:8]
        x = torch.stack([torch.sin(ids.float() * k) for k in range(1, 7)], 1)
        losses = []
        if rank == 0:
            schedule.step(x)
        else:
            schedule.step(target=x[:, :2], losses=losses)
        optimizer.step()
        optimizer.zero_grad()
        order.append(ids[0].item())
        said = torch.stack(losses).mean().item().hex() if losses else "-"
        print(f"r{rank} {step} loss {said} ids {ids.tolist()}", flush=True)
    print(f"r{rank} final {order} {digest(module, optimizer)}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
