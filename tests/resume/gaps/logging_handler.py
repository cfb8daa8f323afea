# state: handlers of loggers, profilers (neither changes what is computed)
# result: keep the state of the restarted script
# reported: no
import logging.handlers

import torch
from toy import begin, end, parts, say, train

rank = begin()
model, optimizer = parts()
log = logging.getLogger("gap")
log.setLevel(logging.INFO)
log.propagate = False
handler = logging.handlers.MemoryHandler(1000)
log.addHandler(handler)
for step in range(12):
    loss = train(model, optimizer, torch.randn(8, 4))
    log.info("loss %s", loss)
    say(rank, step, loss.hex(), len(handler.buffer))
end(rank, model, optimizer)
