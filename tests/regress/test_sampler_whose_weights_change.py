"""A sampler that draws each index by weights which the loop changes was said to differ after an
exact resume: a replay draws by the weights of now."""

from __future__ import annotations

from tests.support.killed import Runner

SCRIPT = """
class Hard(torch.utils.data.Sampler):
    def __init__(self, n):
        self.weights = torch.ones(n)
        self.generator = torch.Generator()
        self.generator.manual_seed(5)
    def __iter__(self):
        for _ in self.weights:
            yield int(torch.multinomial(self.weights, 1, generator=self.generator))
    def __len__(self):
        return len(self.weights)

dataset = torch.utils.data.TensorDataset(torch.arange(40), torch.randn(40, 4))
sampler = Hard(40)
loader = torch.utils.data.DataLoader(dataset, batch_size=4, sampler=sampler)
model = torch.nn.Linear(4, 1)
opt = torch.optim.SGD(model.parameters(), 0.05)
seen = []
for epoch in range(2):
    for i, x in loader:
        opt.zero_grad()
        loss = (model(x) - 1).square().squeeze(1)
        loss.mean().backward()
        opt.step()
        sampler.weights[i] = loss.detach() + 0.1
        seen.append(i.tolist())
final(*model.parameters(), sampler.weights, seen=seen)
"""


def test_it_is_bit_identical(jobs: Runner) -> None:
    said = jobs.same(SCRIPT, REFT_RESUME_VERIFY="always")
    assert "is bit-identical" in said and "DIFFERS" not in said, said
