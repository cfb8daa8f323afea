# state: globals of a function that `runpy.run_path` has made; the dict that it returns is a copy
# result: stay those of the restarted script
# reported: by a verified resume
import runpy
import tempfile
from pathlib import Path

import torch
from toy import begin, end, parts, say, train

path = Path(tempfile.mkdtemp()) / "settings.py"
path.write_text("""
scale = 1.0
def next_scale():
    global scale
    scale *= 0.9
    return scale
""")
settings = runpy.run_path(str(path))
rank = begin()
model, optimizer = parts()
for step in range(12):
    scale = settings["next_scale"]()
    loss = train(model, optimizer, scale * torch.randn(8, 4))
    say(rank, step, loss.hex(), scale)
end(rank, model, optimizer)
