# state: parameters that no module has, and that an optimizer gets from a set
# result: reft identifies them by their position in the optimizer, so reft may restore them into each other's places. The same holds for several modules of equal classes and shapes
# reported: by a verified resume
import os

import torch
from torch import nn
from toy import begin, end, parts, say

rank = begin()
model, _ = parts()


class Bank:
    """Rows by name."""

    def __init__(self):
        self.rows = {name: nn.Parameter(torch.full((3,), float(i))) for i, name in enumerate("abc")}


def main():
    bank = Bank()
    # A set has another order in each process; here it is another one in each attempt.
    rows = list(bank.rows.values())
    if os.environ["TORCHELASTIC_RESTART_COUNT"] != "0":
        rows.reverse()
    groups = [{"params": list(model.parameters())}, {"params": rows}]
    optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
    for step in range(12):
        optimizer.zero_grad()
        loss = model(torch.randn(8, 4)).square().mean()
        for name, row in bank.rows.items():
            loss = loss + (row - ord(name)).square().sum()
        loss.backward()
        optimizer.step()
        say(rank, step, loss.item().hex(), [row.tolist() for row in bank.rows.values()])
    end(rank, model, list(bank.rows.values()))


main()
