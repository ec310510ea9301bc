"""Each request has the same tokens and drafts under any schedule as when it runs alone.

For each drafter, one engine serves the same requests, of every kind, under many schedules: with and
without preemption, small chunks, shared prefixes and async steps. Only the scheduler is new in each
schedule, so all of them run the same programs.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from typing import NamedTuple

import numpy as np
import pytest
from support.engines import SIZES, hold_pages, make_llm
from support.shared_models import EOS, NUM_SNAPSHOTS, eagle3, hybrid, llama

from specjax import LLM, SamplingParams
from specjax.bench.identity import compare
from specjax.device.models.model import is_recurrent
from specjax.engine.metrics import Metrics
from specjax.host.request import Request
from specjax.host.scheduler import Scheduler
from specjax.host.sequence import Sequence as Sample
from specjax.host.speculation.policy import StaticPolicy

pytestmark = pytest.mark.slow

pytest.importorskip("llguidance")
BUDGET, SMALL_BUDGET = SIZES["max_num_batched_tokens"], 10
PAGES_UNDER_PRESSURE = 12  # three requests at their longest have 24
SCHEMA = {"type": "array", "items": {"enum": [1, "a", True]}, "minItems": 1, "maxItems": 3}
KINDS = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 0.8},
    "penalties": {"temperature": 0.8, "presence_penalty": 0.6, "repetition_penalty": 1.2},
    "logprobs": {"temperature": 0.0, "logprobs": 2, "prompt_logprobs": 1},
    "stop": {"temperature": 0.0, "stop": ["~", "ab", "0"], "min_tokens": 6},
    "json": {"temperature": 0.8, "structured_outputs": {"json": SCHEMA}},
}
DRAFTERS = ("none", "ngram", "eagle3", "mtp")


class Schedule(NamedTuple):
    """The events and options of a schedule."""

    preempts: bool = False
    cuts_chunks: bool = False
    caches: bool = False
    is_async: bool = True


@dataclass(frozen=True)
class Served:
    """The results of the requests, in their order."""

    samples: list[Sample]
    metrics: Metrics
    num_prefill_steps: int
    num_drafted: tuple[int, ...]  # rounds, drafts and accepted ones

    @property
    def outputs(self) -> list[list[int]]:
        return [sample.output for sample in self.samples]


@dataclass(frozen=True)
class Drafting:
    """An LLM, its requests, and their expected results under an undisturbed schedule."""

    llm: LLM
    requests: list[Request]
    expected: Served

    def count_near_ties(self, served: Served, expected: Served) -> int:
        """Check that tokens and log-probabilities are equal, except after at most one near-tie."""
        pairs = [(request, 0) for request in self.requests]
        found = compare(self.llm.engine, pairs, expected.outputs, served.outputs)
        assert not found.mismatches
        assert len(found.near_ties) <= 1, found.near_ties
        num_compared = 0
        for one, other in zip(served.samples, expected.samples, strict=True):
            for entry, wanted in zip(one.logprobs, other.logprobs, strict=False):
                if entry.keys() != wanted.keys():
                    break
                num_compared += 1
                for token, logprob in entry.items():
                    assert abs(logprob.logprob - wanted[token].logprob) < 1e-4
        assert num_compared >= 20
        return len(found.near_ties)


@pytest.fixture(scope="module")
def drafting(checkpoints) -> Iterator[Callable[[str], Drafting]]:
    """Return a function that returns the `Drafting` of a drafter, made at its first use."""
    llms = []

    @cache
    def get(drafter):
        folder = hybrid(checkpoints) if drafter == "mtp" else llama(checkpoints).folder
        head = eagle3(checkpoints).folder if drafter == "eagle3" else None
        method = None if drafter == "none" else drafter
        folder = checkpoints.with_letters(folder)
        llms.append(make_llm(folder, method, head, num_snapshots=NUM_SNAPSHOTS))
        requests = make_requests(llms[-1])
        return Drafting(llms[-1], requests, serve(llms[-1], requests, Schedule(is_async=False)))

    yield get
    for llm in llms:
        llm.close()


def make_requests(llm: LLM) -> list[Request]:
    """Return two requests of each kind. Prompts have 3 to 31 tokens, and some share a prefix."""
    rng = np.random.default_rng(0)
    common = rng.integers(0, EOS, 28).tolist()
    requests = []
    for i, (name, length) in enumerate(product(KINDS, (9, 25))):
        tail = rng.integers(0, EOS, 3 + i % 4).tolist()
        params = SamplingParams(max_tokens=28, seed=i, ignore_eos=name != "json", **KINDS[name])
        prompt = (common[:length] if i % 3 else []) + tail
        requests.append(llm.request_maker.make(prompt, params, i, f"prompt {i}"))
    return requests


def serve(llm: LLM, requests: list[Request], schedule: Schedule) -> Served:
    """Run the requests on an idle engine under a schedule."""
    engine = llm.engine
    num_drafts = max(engine.scheduler.policy.choices)
    engine.config = replace(
        engine.config,
        async_scheduling=schedule.is_async,
        enable_prefix_caching=schedule.caches,
        max_num_scheduled_tokens=SMALL_BUDGET if schedule.cuts_chunks else BUDGET,
    )
    snapshots = 1 if is_recurrent(engine.target) else None
    engine.scheduler = Scheduler(engine.config, StaticPolicy(num_drafts), num_snapshots=snapshots)
    if schedule.preempts:
        hold_pages(llm, PAGES_UNDER_PRESSURE)
    engine.prepare(requests)
    samples = [engine.add(request)[0] for request in requests]
    before = engine.metrics()
    while engine.has_work:
        engine.step()
    after = engine.metrics()
    names = "num_prefill_steps", "num_drafts", "num_draft_tokens", "num_accepted_tokens"
    prefills, *drafted = (getattr(after, name) - getattr(before, name) for name in names)
    assert after.num_compiles_after_warmup == before.num_compiles_after_warmup == 0
    assert all(sample.finish_reason in ("length", "stop") for sample in samples)
    return Served(samples, after, prefills, tuple(drafted))


# Each drafter runs all combinations of every two flags, and two drafters run all schedules.
ALL = [Schedule(*flags) for flags in product([False, True], repeat=3)]
EVEN, ODD = ([s for s in ALL if sum(s[:3]) % 2 == odd] for odd in (0, 1))
FAST = [("eagle3", ALL[0]), ("eagle3", ALL[-1])]
SLOW = [*product(["eagle3"], EVEN[1:]), *product(["mtp"], ODD)]
NIGHTLY = [*product(["ngram"], EVEN), *product(["none"], ODD)]


@pytest.mark.parametrize(
    "drafter, schedule",
    [
        *FAST,
        *(pytest.param(*pair, marks=pytest.mark.slow) for pair in SLOW),
        *(pytest.param(*pair, marks=pytest.mark.nightly) for pair in NIGHTLY),
    ],
    ids=str,
)
def test_a_step_in_flight_changes_nothing(drafting, drafter, schedule):
    made = drafting(drafter)
    with_one, without = (
        serve(made.llm, made.requests, schedule._replace(is_async=is_async))
        for is_async in (True, False)
    )
    for served in with_one, without:
        num_near_ties = made.count_near_ties(served, made.expected)
        assert (served.metrics.num_preemptions > 0) == schedule.preempts
        assert (served.metrics.prefix_cache_hits > 0) == schedule.caches or schedule.preempts
        assert num_near_ties or served.num_drafted == made.expected.num_drafted
    if schedule.cuts_chunks:
        assert with_one.num_prefill_steps > made.expected.num_prefill_steps
    if drafter in ("eagle3", "mtp"):
        _, num_draft_tokens, num_accepted = made.expected.num_drafted
        assert 0 < num_accepted < num_draft_tokens
    assert made.count_near_ties(with_one, without) == 0
    assert with_one.metrics.in_flight_depth > 0


# `test_stress` compares the tokens of a hybrid with its module and without.
@pytest.mark.parametrize("drafter", ["eagle3", pytest.param("ngram", marks=pytest.mark.nightly)])
def test_drafts_change_nothing(drafting, drafter):
    made = drafting(drafter)
    made.count_near_ties(made.expected, drafting("none").expected)
