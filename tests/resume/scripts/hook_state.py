# ranks: 2; kills: 3 6 9
# State that nothing but hooks hold: closures and objects behind hooks of modules, parameters, the
# optimizer, and of the communication, which rounds gradients and keeps the error for the next step.
import torch
import torch.distributed as dist
import torch.nn.functional as F
from digest import digest
from torch import nn


class Whitening:
    def __init__(self, momentum):
        self.momentum, self.mean, self.calls = momentum, None, 0

    def before(self, module, inputs):
        (x,) = inputs
        self.calls += 1
        now = x.detach().mean(0)
        self.mean = now if self.mean is None else self.mean.lerp(now, self.momentum)
        return (x - self.mean,)


class Rounding:
    def __init__(self):
        self.errors = {}


def rounded(state, bucket):
    gradient = bucket.buffer() + state.errors.get(bucket.index(), 0.0)
    sent = (gradient * 64).round() / 64
    state.errors[bucket.index()] = gradient - sent
    dist.all_reduce(sent)
    future = torch.futures.Future()
    future.set_result(sent / dist.get_world_size())
    return future


def scaled_by_history(limit):
    largest = []

    def hook(module, inputs, output):
        largest.append(output.detach().abs().max().item())
        del largest[:-limit]
        return output / max(1.0, sum(largest) / len(largest))

    return hook


def clipped_by_average(parameter):
    average = None

    def hook(p):
        nonlocal average
        norm = p.grad.norm().item()
        average = norm if average is None else 0.9 * average + 0.1 * norm
        p.grad.mul_(min(1.0, average / (norm + 1e-9)))

    parameter.register_post_accumulate_grad_hook(hook)


def warm_up(optimizer, steps):
    taken = 0

    def hook(*_):
        nonlocal taken
        taken += 1
        for group in optimizer.param_groups:
            group["lr"] = 0.05 * min(1.0, taken / steps)

    optimizer.register_step_post_hook(hook)


def main():
    dist.init_process_group("reft")
    rank = dist.get_rank()
    torch.manual_seed(11)
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    net[0].register_forward_pre_hook(Whitening(0.2).before)
    net[0].register_forward_hook(scaled_by_history(6))
    for p in net[2].parameters():
        clipped_by_average(p)
    model = nn.parallel.DistributedDataParallel(net)
    model.register_comm_hook(Rounding(), rounded)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    warm_up(optimizer, 8)
    torch.manual_seed(100 + rank)
    for step in range(14):
        x = torch.randn(16, 8)
        loss = F.cross_entropy(model(x), x[:, :4].argmax(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"r{rank} {step} {loss.item().hex()} lr {optimizer.param_groups[0]['lr']}", flush=True)
    print(f"r{rank} final {digest(net, optimizer)}", flush=True)
    dist.destroy_process_group()


main()
