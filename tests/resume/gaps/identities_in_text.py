# state: what `id(…)` has given, inside a text (`f"{id(p)}"`) or as a part of a greater number
# result: stays that of the killed process
# reported: no
import torch
from toy import begin, end, parts, say, train

if __name__ == "__main__":
    rank = begin()
    model, optimizer = parts()
    scales = {f"{id(p)}": 0.5 for p in model.parameters()}
    for step in range(12):
        loss = train(model, optimizer, torch.randn(8, 4))
        scales["steps"] = step
        if step % 4 == 3:
            with torch.no_grad():
                for p in model.parameters():
                    p.mul_(scales.get(f"{id(p)}", 1.0))
        say(rank, step, loss.hex())
    end(rank, model, optimizer)
