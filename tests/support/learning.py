"""Pieces of the scripts that restore tests run."""

# A model, and one step of it. Weights are not the continuation's to restore.
LEARN = """\
model = torch.nn.Linear(3, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
def learn():
    optimizer.zero_grad()
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
"""
# A descriptor that keeps the values of its owners aside, in a weak dict.
ASIDE = """\
class Aside:
    def __init__(self):
        self.values = weakref.WeakKeyDictionary()
    def __get__(self, one, owner=None):
        return self if one is None else self.values.get(one, 0)
    def __set__(self, one, value):
        self.values[one] = value
"""
