# state: attributes of classes in modules that are not in `sys.modules` (loaded by `importlib.util.module_from_spec` alone)
# result: start again
# reported: by a verified resume
import importlib.util
import os
import tempfile

import torch
from toy import begin, end, parts, say, train

if __name__ == "__main__":
    rank = begin()
    model, optimizer = parts()
    with tempfile.NamedTemporaryFile("w", suffix=".py", delete=False) as file:
        file.write("class Schedule:\n    scale = 1.0\n")
    spec = importlib.util.spec_from_file_location("plugin_of_script", file.name)
    plugin = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(plugin)
    os.unlink(file.name)
    for step in range(12):
        loss = train(model, optimizer, torch.randn(8, 4) * plugin.Schedule.scale)
        plugin.Schedule.scale *= 0.9
        say(rank, step, loss.hex())
    end(rank, model, optimizer)
