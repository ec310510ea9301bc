"""Rollouts while weights change: the same with and without drafts, and as in transformers."""

import copy
from dataclasses import replace

import jax
import numpy as np
import pytest
from support.engines import K
from support.rollouts import (
    PROMPTS,
    SAMPLED,
    SETTINGS,
    TOLERANCE,
    assert_same,
    changed,
    copied,
    lasting,
    log_softmax,
    logits_of,
    noisy,
)

from specjax import SamplingParams
from specjax.rl import RolloutEngine, Span
from specjax.rl.weights import ArraySource

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("kind", ["llama", pytest.param("qwen3_5", marks=pytest.mark.nightly)])
def test_drafts_change_nothing_across_updates(build, target, module, kind):
    """Ten updates: without a drafter, with an outdated one, and with an updated one."""
    folder, drafts = target.folder, True
    if kind == "qwen3_5":
        folder, drafts = module.folder, {"method": "mtp", "num_speculative_tokens": K}
    plain, stale, fresh = (build(folder, drafts=one) for one in (False, drafts, drafts))
    weights, drafter = copied(plain.params.target), copied(fresh.params.drafter)
    params, tokens = replace(SAMPLED, n=1), set()
    for step in range(1, 11):
        weights = noisy(weights, step)
        drafter = replace(drafter, fc=noisy(drafter.fc, step))
        for engine in plain, stale:
            engine.update_weights(weights, version=step)
        fresh.update_weights(weights, version=step, drafter=drafter)
        batches = [engine.generate(PROMPTS, params) for engine in (plain, stale, fresh)]
        assert_same(batches[1], batches[0])
        assert_same(batches[2], batches[0])
        assert {span.version for one in batches[2] for span in one.versions} == {step}
        tokens.add(tuple(token for one in batches[0] for token in one.token_ids.tolist()))
    assert len(tokens) == 10  # all weights draw otherwise
    assert all(engine.metrics().num_accepted_tokens > 0 for engine in (stale, fresh))
    assert fresh.drafter_version == 10 and stale.drafter_version == 0
    assert [one.version for one in fresh.acceptance()] == list(range(11))
    assert all(one.num_drafts > 0 for one in stale.acceptance()[1:])


def test_what_comes_next_is_a_fresh_engines(build, target, original, compilations):
    """Nothing compiles, old pages are not found, and the trainer may donate its arrays."""
    engine = build()
    params = SamplingParams(temperature=0, max_tokens=20)
    for _ in range(2):
        before = engine.metrics().prefix_cache_hits
        engine.generate(PROMPTS, params)
    assert engine.metrics().prefix_cache_hits > before  # as they are without an update
    engine.score([([1, 2], [3])])
    num_programs = engine.metrics().num_compilations
    weights = noisy(original, 1)
    kept = copied(weights)
    held = jax.tree.leaves(weights)
    with compilations.none_expected():
        update = engine.update_weights(weights)
        before = engine.metrics().prefix_cache_hits
        batch = engine.generate(PROMPTS, params)
        engine.score([([1, 2], [3])])
        assert engine.metrics().prefix_cache_hits == before
    assert engine.metrics().num_compiles_after_warmup == 0
    assert engine.metrics().num_compilations == num_programs
    assert update.version == engine.version == 1
    assert update.num_arrays == len(held) and update.seconds > 0
    assert update.num_bytes == sum(leaf.nbytes for leaf in held)
    jax.tree.map(np.testing.assert_array_equal, copied(weights), kept)
    for leaf in held:  # as by a train step that donates
        leaf.delete()
    with RolloutEngine(engine.target, params=kept, **SETTINGS) as new:
        expected = new.generate(PROMPTS, params)
    for found in batch, engine.generate(PROMPTS, params):
        assert [x.token_ids.tolist() for x in found] == [x.token_ids.tolist() for x in expected]


def assert_drawn_by(rollout, weights, hf):
    """Check that each token has the log-probability of the weights that its span names."""
    start = 0
    for version, count in rollout.versions:
        hf.load_state_dict(weights[version])
        raw = log_softmax(logits_of(hf, rollout))
        rows = np.arange(start, start + count)
        expected = raw[rows, rollout.token_ids[rows]]
        np.testing.assert_allclose(rollout.raw_logprobs[rows], expected, atol=TOLERANCE)
        start += count
    assert start == len(rollout.token_ids)


@pytest.mark.parametrize("pause", ["abort", "wait", "keep"])
def test_an_update_in_the_middle(engine, hf, pause):
    """The update is between two steps of the generating thread. Spans name the versions."""
    old = engine.version
    weights = {old: copy.deepcopy(hf.state_dict()), old + 1: changed(hf, 7)}
    prompts = [*PROMPTS, *PROMPTS]
    stream = engine.stream(prompts, lasting(3, *[40] * 7))
    rollouts = [next(stream)]
    engine.update_weights(weights[old + 1], pause=pause)
    rollouts += stream
    assert len(rollouts) == len(prompts)
    seen = {tuple(span.version for span in one.versions) for one in rollouts}
    if pause == "wait":
        assert seen == {(old,)}
    elif pause == "keep":
        assert seen == {(old,), (old, old + 1), (old + 1,)}
    else:
        assert seen <= {(old,), ()} and any(one.is_partial for one in rollouts)
    assert engine.version == old + 1
    for one in [*rollouts, *engine.generate(PROMPTS, lasting(*[40] * 4))]:
        assert_drawn_by(one, weights, hf)
    assert {one.prompt_index for one in rollouts} == set(range(len(prompts)))


PARAMS = [
    SamplingParams(n=2, temperature=1.0, max_tokens=40, ignore_eos=True),
    SamplingParams(temperature=0.9, top_p=0.8, repetition_penalty=1.2, max_tokens=40),
    SamplingParams(temperature=1.0, max_tokens=40, min_tokens=8, stop_token_ids=[1, 2, 3]),
]


@pytest.mark.parametrize("params", PARAMS)
def test_what_goes_on_is_what_would_have_come(build, params):
    """Tokens and log-probabilities do not depend on how often a rollout was aborted."""
    settings = [replace(params, max_tokens=n) for n in (8, 25, 40, 40)]
    whole = build(drafts=False).generate(PROMPTS, settings)
    engine = build()
    stream = engine.stream(PROMPTS, settings)
    rollouts, num_breaks = {}, 0
    while True:
        for one in stream:  # all others are aborted whenever one is complete
            rollouts[one.prompt_index, one.sample_index] = one
            engine.abort()
        partial = [one for one in rollouts.values() if one.is_partial]
        if not partial:
            break
        assert any(len(one.token_ids) for one in partial)
        stream = engine.stream(partial)
        num_breaks += 1
    assert num_breaks >= 2
    found = [rollouts[key] for key in sorted(rollouts)]
    assert_same(found, whole)
    for one, other, score in zip(found, whole, engine.score(found), strict=True):
        np.testing.assert_allclose(one.raw_logprobs, score.raw_logprobs, atol=TOLERANCE)
        assert one.versions == (Span(0, len(one.token_ids)),) and one.seed == other.seed


def test_a_partial_rollout_goes_on_under_later_weights(engine, original):
    stream = engine.stream(PROMPTS, lasting(2, 40, 40, 40))
    rollouts = [next(stream)]
    engine.abort()
    partial = [one for one in stream if one.is_partial and len(one.token_ids)]
    old = engine.version
    engine.update_weights(noisy(original, 3))
    assert partial and rollouts
    for one, before in zip(engine.generate(partial), partial, strict=True):
        count = len(before.token_ids)
        assert one.versions == (Span(old, count), Span(old + 1, 40 - count))
        assert one.token_ids[:count].tolist() == before.token_ids.tolist()
        np.testing.assert_array_equal(one.logprobs[:count], before.logprobs)
        scored = engine.score([(one.prompt_token_ids, one.token_ids)])[0].logprobs
        np.testing.assert_allclose(one.logprobs[count:], scored[count:], atol=TOLERANCE)
        assert np.abs(one.logprobs[:count] - scored[:count]).max() > 1e-3


def test_an_update_that_fails_half_way(engine, original, monkeypatch):
    """Mixed weights of two versions generate nothing, until another update succeeds."""
    stream = engine.stream(PROMPTS, lasting(2, 40, 40, 40))
    rollouts, version = [next(stream)], engine.version
    copy, seen = ArraySource.copy, []

    def fail(self, *args):
        seen.append(self)
        if len(seen) == fails_at:
            raise MemoryError("no room")
        return copy(self, *args)

    monkeypatch.setattr(ArraySource, "copy", fail)
    for fails_at in 1, 3:
        seen.clear()
        with pytest.raises(MemoryError):
            engine.update_weights(noisy(original, 1))
        assert engine.version == version
        if fails_at == 1:  # nothing has changed, and rollouts go on
            engine.score([([1], [2])])
    monkeypatch.undo()
    for call in (
        lambda: engine.generate(PROMPTS, SAMPLED),
        lambda: engine.score([([1], [2])]),
        lambda: engine.update_weights(original, pause="wait"),
    ):
        with pytest.raises((RuntimeError, ValueError), match="half-way"):
            call()
    engine.update_weights(original)
    rollouts += stream
    assert [one.is_partial for one in rollouts] == [False] * 4
    assert {one.versions[-1].version for one in rollouts[1:]} == {version + 1}
