# state: warning filters, levels of loggers
# result: keep the values of the restarted script, which changes only what is printed
# reported: no
import logging
import warnings

import torch
from toy import begin, end, parts, say, train

rank = begin()
model, optimizer = parts()
log = logging.getLogger("gap")
for step in range(12):
    loss = train(model, optimizer, torch.randn(8, 4))
    if step == 3:
        log.setLevel(logging.ERROR)
        warnings.simplefilter("error", FutureWarning)
    say(rank, step, loss.hex(), log.level, warnings.filters[0][0])
end(rank, model, optimizer)
