# state: closures of functions that the script gives to `torch.library.Library.impl`, or to another registry that is written in C or C++, if nothing else holds them
# result: start again
# reported: by a verified resume
import torch
from toy import begin, end, parts, say, train


def implemented(library):
    calls = []

    def scaled(x):
        calls.append(1)
        return x * (1 + 0.1 * len(calls))

    library.define("scaled(Tensor x) -> Tensor")
    library.impl("scaled", scaled, "CPU")


library = torch.library.Library("gap", "DEF")
implemented(library)
rank = begin()
model, optimizer = parts()
for step in range(12):
    loss = train(model, optimizer, torch.ops.gap.scaled(torch.randn(8, 4)))
    say(rank, step, loss.hex())
end(rank, model, optimizer)
