# state: globals and attributes of classes and functions of installed packages (reft looks at those that come from a folder of this machine, as with `pip install .`)
# result: start again
# reported: no
import os
import sys
import tempfile

import torch
from toy import begin, end, parts, say, train

if __name__ == "__main__":
    folder = os.path.join(tempfile.mkdtemp(), "site-packages")
    os.mkdir(folder)
    with open(os.path.join(folder, "counting.py"), "w") as file:
        file.write("seen = 0\ndef count():\n    global seen\n    seen += 1\n    return seen\n")
    sys.path.insert(0, folder)
    import counting

    rank = begin()
    model, optimizer = parts()
    for step in range(12):
        loss = train(model, optimizer, torch.randn(8, 4))
        say(rank, step, loss.hex(), counting.count())
    end(rank, model, optimizer)
