"""Each method of drafting, with all other features: outputs are as without drafts.

For each method, one engine for rollouts serves random schedules with changing K, and weight
updates. A second engine in exact mode also follows grammars. A third one verifies in another way.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from support.engines import EXACT, SIZES, K, generate, generate_tokens, make_llm, random_prompts
from support.marks import marked
from support.real_schedules import Found, run_real_schedule
from support.refits import moved
from support.schedules import AnyPolicy
from support.shared_models import (
    EOS,
    NUM_SNAPSHOTS,
    hybrid,
    llama,
    of_few_words,
    other_letters,
    parallel_head,
)

from specjax import LLM, SamplingParams
from specjax.host.speculation.policy import StaticPolicy
from specjax.methods import METHODS
from specjax.rl import RolloutEngine

pytest.importorskip("llguidance")

SNAPSHOTS = {"num_snapshots": NUM_SNAPSHOTS}
PROMPT_LENGTHS = (1, 33, 38, 5, 32, 17, 36, 8)  # as long as random schedules allow, with outputs
GRAMMARS = {"regex": "[A-Z][a-z ]{3,12}!"}, {"choice": ["yes", "no", "yes, but no"]}, None


class Way(NamedTuple):
    """A way of drafting."""

    method: str
    num_slots: int  # rows that a request has beside the target's, as vLLM counts them
    verification: str  # another way of verifying, to try
    sources: tuple[str, ...] = ()  # of drafts on the host


WAYS = {
    "ngram": Way("ngram", 0, "block"),
    "suffix": Way("suffix", 0, "rejection"),
    "p_eagle": Way("p_eagle", K - 1, "rejection"),
    "p_eagle with suffix": Way("p_eagle", K - 1, "rejection", ("suffix",)),
    "dflash": Way("dflash", 0, "block"),
    "dspark": Way("dflash", 0, "rejection"),
    "dflash2": Way("dflash", 0, "block"),
    "medusa": Way("medusa", 0, "rejection"),
    "draft_model": Way("draft_model", 1, "block"),
    "hybrid draft_model": Way("draft_model", 1, "rejection"),
    "draft_model of other tokens": Way("draft_model", 1, "block"),
}


def ways(*slow):
    """Run a test with these ways of drafting, and by night with all others."""
    return pytest.mark.parametrize("served", marked(WAYS, slow=slow), indirect=True, scope="module")


class Served(NamedTuple):
    """A way of drafting, engines with and without it, and a function that makes LLMs with it."""

    way: Way
    drafting: RolloutEngine
    plain: RolloutEngine
    make: Callable[..., LLM]


def head_of(checkpoints, name) -> Path | None:
    """Return the folder of a drafter; None if it needs no separate checkpoint."""
    if name == "draft_model of other tokens":
        return other_letters(checkpoints)
    method = WAYS[name].method
    if method == "draft_model":
        is_hybrid = name.startswith("hybrid")
        other = hybrid(checkpoints) if is_hybrid else llama(checkpoints, seed=1).folder
        return checkpoints.with_letters(of_few_words(checkpoints, other))
    return (
        parallel_head(checkpoints, name.partition(" ")[0]) if METHODS[method].needs_model else None
    )


@pytest.fixture(scope="module")
def served(request, checkpoints, process) -> Iterator[Served]:
    folder = checkpoints.with_letters(of_few_words(checkpoints, llama(checkpoints).folder))
    way, head = WAYS[request.param], head_of(checkpoints, request.param)
    sizes = {**SIZES, **SNAPSHOTS}
    config = {"method": way.method, "num_speculative_tokens": K, "with": way.sources}
    if head is not None:
        config["model"] = str(head)
    with (
        RolloutEngine(folder, speculative_config=config, **sizes) as drafting,
        RolloutEngine(folder, **sizes, enable_prefix_caching=False) as plain,
    ):
        drafting._llm.engine.set_policy(AnyPolicy((0, K), np.random.default_rng(0)))

        def make(**options):
            more = {"with": way.sources, **options.pop("speculation", {})}
            return make_llm(folder, way.method, head, speculation=more, **SNAPSHOTS, **options)

        yield Served(way, drafting, plain, make)
    process.keep_small()


@pytest.fixture(scope="module")
def asked() -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts, and parameters at temperature 0 and above."""
    prompts = random_prompts(*PROMPT_LENGTHS, vocab_size=EOS, seed=5)
    params = [
        SamplingParams(temperature=0.8 * (i % 2), seed=i, max_tokens=24, ignore_eos=True)
        for i in range(len(prompts))
    ]
    return prompts, params


@ways("dflash", "draft_model")
def test_random_schedules(served):
    """Requests join, leave, share prefixes and are preempted. K changes in every round."""
    found = Found()
    for seed in range(5):
        found += run_real_schedule(served.drafting._llm, served.plain._llm, seed)
    assert not found.identity.mismatches
    assert len(found.identity.near_ties) < 0.02 * found.identity.num_outputs
    rare = "preemptions", "aborted", "prefix hits", "accepted"
    assert all(found.tally[name] > 0 for name in rare), found.tally
    engine = served.drafting._llm.engine
    assert engine.metrics().k_histogram.keys() == {0, K}
    assert engine.drafter.draft_slots(K) == served.way.num_slots, "room of a step for drafting"
    assert engine.scheduler._draft_slots == served.way.num_slots


@ways("dflash")
def test_exact_mode(served, asked):
    """Bits are equal with and without drafts, other requests and grammars."""
    prompts, params = asked
    params = [
        replace(one, logprobs=2, structured_outputs=grammar, ignore_eos=grammar is None)
        for one, grammar in zip(params, GRAMMARS * 3, strict=False)
    ]
    with served.make(**EXACT) as llm:

        def outcomes(which):
            found = generate(llm, [prompts[i] for i in which], [params[i] for i in which])
            return [(one.outputs[0].token_ids, one.outputs[0].logprobs) for one in found]

        llm.engine.set_policy(StaticPolicy(0))
        alone = [outcomes([i])[0] for i in range(len(prompts))]
        llm.engine.set_policy(AnyPolicy((0, 1, K), np.random.default_rng(0)))
        backwards = range(len(prompts))[::-1]
        assert outcomes(backwards)[::-1] == alone
        assert llm.metrics().num_accepted_tokens > 0


@ways("draft_model")
def test_other_verifications(served, asked):
    """Greedy tokens are equal; sampled outputs have the requested length."""
    prompts, params = asked
    with served.make(speculation={"verification": served.way.verification}) as llm:
        found = generate_tokens(llm, prompts, params)
        assert llm.metrics().num_accepted_tokens > 0
    expected = generate_tokens(served.plain._llm, prompts, params)
    for one, tokens, other in zip(params, found, expected, strict=True):
        assert tokens == other if one.temperature == 0 else len(tokens) == 24


@ways("dflash", "draft_model")
def test_updates(served, asked):
    """After updates of the target and of the drafter, rollouts are as without a drafter."""
    prompts, params = asked
    weights = moved(served.plain.params.target)
    for engine in served.drafting, served.plain:
        engine.update_weights(weights)
    expected = served.plain.generate(prompts, params)
    rollouts = [served.drafting.generate(prompts, params)]
    if served.drafting.drafter.weights is not None:
        served.drafting.update_drafter(moved(served.drafting.params.drafter, 0.3))
        rollouts.append(served.drafting.generate(prompts, params))
    for found in rollouts:
        for one, other in zip(found, expected, strict=True):
            assert one.token_ids.tolist() == other.token_ids.tolist()
            np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-4)
