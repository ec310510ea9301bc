"""The warning about a drafter whose drafts are almost never accepted, on simulated devices."""

import logging
from dataclasses import dataclass

import pytest
from support.engines import K, make_llm, simulated_engines
from support.scripts import HashScript, draw
from support.shared_models import VOCAB, eagle3, llama

from specjax import SamplingParams

pytestmark = pytest.mark.slow

PARAMS = SamplingParams(temperature=1.0, max_tokens=100, ignore_eos=True)


@dataclass(frozen=True)
class Unlucky(HashScript):
    """A script in which one draft is accepted in one of `rarity` rounds, and no other draft."""

    rarity: int = 1

    def draft(self, slot, follow, k, most):
        digest = int(slot.digests[len(slot.tokens)])
        is_lucky = draw(digest, slot.seed, 99, self.rarity) == 0
        first = (follow(slot, []) + (not is_lucky)) % VOCAB
        return [first, *[0] * (k - 1)][:k], most


@pytest.mark.parametrize(
    "method, rarity, num_requests, lines",
    [("eagle3", 10, 12, 1), ("eagle3", 10, 1, 0), ("eagle3", 3, 12, 0), ("ngram", 10, 12, 0)],
)
def test_it_is_said_once(checkpoints, caplog, method, rarity, num_requests, lines):
    """The warning is for trained drafters with less than 5 % accepted of 1,000 draft tokens."""
    head = eagle3(checkpoints).folder if method == "eagle3" else None
    caplog.set_level(logging.WARNING, "specjax")
    script = Unlucky(VOCAB, rarity=rarity)
    with simulated_engines(script), make_llm(llama(checkpoints).folder, method, head) as llm:
        for _ in range(2):
            prompts = [[i % VOCAB] * 3 for i in range(num_requests)]
            llm.generate(prompts, PARAMS, use_tqdm=False)
        metrics = llm.metrics()
    found = [line for line in caplog.messages if "draft tokens were accepted" in line]
    rate = metrics.num_accepted_tokens / metrics.num_draft_tokens
    assert rate == pytest.approx(1 / rarity / K, rel=0.4)
    assert len(found) == lines and all("Usual causes" in line for line in found)
