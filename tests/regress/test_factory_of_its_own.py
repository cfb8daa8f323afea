"""A defaultdict whose factory is a method of its own, as of a vocabulary that numbers its words, got the
factory of the dict that it replaced: all later words had the number 0."""

from __future__ import annotations

from tests.support.killed import Runner

SCRIPT = """
from collections import defaultdict
vocabulary = defaultdict()
vocabulary.default_factory = vocabulary.__len__
embedding = torch.nn.Embedding(64, 4)
opt = torch.optim.SGD(embedding.parameters(), lr=0.05)
for step in range(12):
    rows = torch.tensor([vocabulary[f"word {step}"], vocabulary[f"word {step // 2}"]])
    opt.zero_grad()
    embedding(rows).square().mean().backward()
    opt.step()
final(*embedding.parameters(), words=dict(vocabulary))
"""


def test_words_that_come_later_have_numbers_of_their_own(jobs: Runner) -> None:
    jobs.same(SCRIPT, 1, "0:8:before_seal")
