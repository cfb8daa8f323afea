"""Optimizer state in a tensor made of several (8-bit optimizers) ended all snapshots."""

from __future__ import annotations

from tests.support.killed import Runner

SCRIPT = """
class Q(torch.Tensor):
    @staticmethod
    def __new__(cls, codes, scale):
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, device=codes.device, dtype=torch.float32)
    def __init__(self, codes, scale): self.codes, self.scale = codes, scale
    def __tensor_flatten__(self): return ["codes", "scale"], []
    @classmethod
    def __tensor_unflatten__(cls, t, meta, a=None, b=None): return cls(t["codes"], t["scale"])
    @classmethod
    def __torch_dispatch__(cls, func, types, args, kwargs=None):
        if func in (torch.ops.aten.detach.default,):
            return cls(args[0].codes, args[0].scale)
        args = torch.utils._pytree.tree_map(lambda a: a.deq() if isinstance(a, Q) else a, args)
        return func(*args, **(kwargs or {}))
    def deq(self): return self.codes.float() * self.scale
    def put(self, x):
        self.scale.copy_(x.abs().max() / 127 + 1e-12); self.codes.copy_((x / self.scale).round())
class SGD8(torch.optim.Optimizer):
    def __init__(self, params, lr): super().__init__(params, dict(lr=lr))
    @torch.no_grad()
    def step(self, closure=None):
        for g in self.param_groups:
            for p in g["params"]:
                s = self.state[p]
                if "buf" not in s: s["buf"] = Q(torch.zeros(p.shape, dtype=torch.int8), torch.ones(()))
                m = s["buf"].deq() * 0.9 + p.grad
                s["buf"].put(m); p.sub_(m, alpha=g["lr"])

model = torch.nn.Linear(64, 64)
opt = SGD8(model.parameters(), lr=0.01)
for step in range(1, 13):
    loss = model(torch.randn(16, 64)).square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
final(*model.state_dict().values())
"""


def test_state_in_a_wrapper_subclass(jobs: Runner) -> None:
    jobs.same(SCRIPT)
