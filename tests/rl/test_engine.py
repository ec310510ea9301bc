"""Rollouts under weights that change: the same with and without drafts, and as transformers has it.

The oracle of every log-probability is transformers' forward over the finished text, by the weights
that drew it, shaped by `conftest.Asked`.
"""

import threading
import time
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import LLM, SamplingParams
from specjax.host.speculation.policy import StaticPolicy
from specjax.rl import RolloutEngine, Span
from specjax.rl.engine import RolloutError

VOCAB = 32
K = 3
TOLERANCE = 1e-4
SETTINGS = {
    "max_model_len": 64,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 32,
    "page_size": 8,
    "seed": 3,
}
PROMPTS = [[4, 9, 1], [7, 2, 2, 8, 11, 3, 5, 1, 6], [30], list(range(20))]
SAMPLED = SamplingParams(n=2, temperature=1.2, top_p=0.9, max_tokens=20)


@pytest.fixture(scope="module")
def target(checkpoints):
    return checkpoints.target("llama", vocab_size=VOCAB)


@pytest.fixture(scope="module")
def speculation(checkpoints, target):
    head = checkpoints.eagle3(target, draft_vocab=20)
    return {"method": "eagle3", "model": str(head.folder), "num_speculative_tokens": K}


@pytest.fixture(scope="module")
def build(target, speculation):
    """Engines over the target, closed at the end of the module."""
    engines = []

    def make(folder=target.folder, *, drafts=True, **options):
        config = speculation if drafts is True else drafts or None
        engines.append(RolloutEngine(folder, speculative_config=config, **(SETTINGS | options)))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


@pytest.fixture
def engine(shared_engine, original):
    """An engine with the target's own weights."""
    shared_engine.update_weights(original)
    yield shared_engine
    shared_engine.wake_up()
    shared_engine.resume()


@pytest.fixture(scope="module")
def shared_engine(build):
    return build(raw_logprobs=True)


@pytest.fixture(scope="module")
def original(shared_engine):
    return jax.tree.map(np.array, shared_engine.params.target)


@pytest.fixture(scope="module")
def logits_of():
    """transformers' logits f64[T, V] of the tokens of an output, each after those before it."""
    import torch

    def score(hf, rollout):
        tokens = [*rollout.prompt_token_ids.tolist(), *rollout.token_ids.tolist()]
        with torch.no_grad():
            logits = hf(torch.tensor([tokens])).logits[0].double().numpy()
        return logits[len(rollout.prompt_token_ids) - 1 : -1]

    return score


def noisy(params, seed, scale=0.05):
    """Other weights, as after a step of training."""
    leaves, tree = jax.tree.flatten(params)
    rng = np.random.default_rng(seed)
    return tree.unflatten(
        [jnp.array(x + scale * rng.normal(size=x.shape).astype(x.dtype)) for x in leaves]
    )


def changed(hf, seed):
    """A transformers model with other weights, and their state_dict."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in hf.parameters():
            tensor += 0.05 * torch.randn(tensor.shape, generator=generator)
    return hf.state_dict()


@pytest.fixture
def hf(target):
    """A copy of the transformers model, free to change."""
    import copy

    return copy.deepcopy(target.hf)


def assert_same(some, others):
    assert len(some) == len(others) > 0
    for one, other in zip(some, others, strict=True):
        assert one.token_ids.tolist() == other.token_ids.tolist()
        assert one.finish_reason == other.finish_reason
    assert_close([one.logprobs for one in some], [one.logprobs for one in others], some[0].params)


def assert_close(some, others, params):
    """The same log-probabilities, rollout by rollout.

    Where a distribution is cut, a candidate at the very edge is in or out by the rounding of a
    program: the others then share a little more or less, once in thousands of tokens.
    """
    found, expected = np.concatenate(list(some)), np.concatenate(list(others))
    differences = np.abs(found - expected)
    is_cut = params.top_p < 1 or params.top_k > 0 or params.min_p > 0
    far = differences[differences > TOLERANCE]
    assert len(far) <= (len(found) // 300 + 1 if is_cut else 0) and (far < 0.1).all()


def log_softmax(logits):
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


# --- what a rollout is ----------------------------------------------------------------------------


def test_a_batch_has_every_sample_of_every_prompt_in_order(engine):
    batch = engine.generate(PROMPTS, SAMPLED)
    assert [(one.prompt_index, one.sample_index) for one in batch] == [
        (prompt, sample) for prompt in range(len(PROMPTS)) for sample in range(2)
    ]
    for one in batch:
        assert one.prompt_token_ids.tolist() == PROMPTS[one.prompt_index]
        assert len(one.logprobs) == len(one.raw_logprobs) == len(one.token_ids) <= 20
        assert one.versions == (Span(engine.version, len(one.token_ids)),)
        assert one.params == SAMPLED and one.finish_reason in ("stop", "length")
    assert len({one.seed for one in batch}) == len(batch)


def test_samples_share_the_pages_of_their_prompt(engine):
    before = engine.metrics()
    engine.generate([list(range(1, 29))], replace(SAMPLED, n=4))
    after = engine.metrics()
    assert after.prefix_cache_hits - before.prefix_cache_hits == 3 * 24
    assert after.num_prompt_tokens - before.num_prompt_tokens == 28 + 3 * 4


def test_a_stream_gives_what_a_batch_does(build):
    batch = build(drafts=False).generate(PROMPTS, SAMPLED)
    streamed = list(build().stream(PROMPTS, SAMPLED))
    streamed.sort(key=lambda one: (one.prompt_index, one.sample_index))
    assert_same(streamed, batch)


@pytest.mark.parametrize(
    "shape",
    [
        {"temperature": 1.0},
        {"temperature": 0.7},
        {"temperature": 1.3, "top_k": 5},
        {"temperature": 0.8, "top_p": 0.6},
        {"temperature": 1.5, "top_k": 12, "top_p": 0.9, "min_p": 0.02},
        {"temperature": 0.9, "repetition_penalty": 1.3, "frequency_penalty": 0.4},
        {"temperature": 1.0, "logit_bias": {3: 4.0}, "stop_token_ids": [2], "min_tokens": 9},
    ],
    ids=str,
)
def test_log_probabilities_are_those_of_the_trainers_own_forward(
    engine, hf, logits_of, asked, shape
):
    """Under temperature, top-p, top-k and the rest; as they are drawn, and scored afterwards."""
    weights = changed(hf, seed=5)
    engine.update_weights(weights)
    params = SamplingParams(n=2, max_tokens=20, **shape)
    batch = engine.generate(PROMPTS, params)
    scores = engine.score(batch)
    again = engine.score([(one.prompt_token_ids, one.token_ids) for one in batch], params)
    expected = []
    for one, score, same in zip(batch, scores, again, strict=True):
        logits, tokens = logits_of(hf, one), one.token_ids.tolist()
        request = asked(
            params, one.prompt_token_ids.tolist(), [], stop_ids=list(params.stop_token_ids)
        )
        drawn = [
            np.log(request.then(*tokens[:i]).probs(logits[i])[token])
            for i, token in enumerate(tokens)
        ]
        raw = log_softmax(logits)[np.arange(len(tokens)), tokens]
        expected.append(drawn)
        for found in one, score, same:
            np.testing.assert_allclose(found.raw_logprobs, raw, atol=TOLERANCE)
    for found in batch, scores, again:
        assert_close([one.logprobs for one in found], expected, params)


def test_raw_ones_only_if_asked_for(build):
    engine = build()
    (one,) = engine.generate([PROMPTS[0]], replace(SAMPLED, n=1))
    assert one.raw_logprobs is None and engine.score([one])[0].raw_logprobs is None


def test_features_are_the_targets_states(engine, hf, logits_of):
    """The states after the norm give transformers' logits; the auxiliary ones are its own."""
    import torch

    batch = engine.generate(PROMPTS, SAMPLED)
    scores = engine.score(batch, features=True)
    weight = hf.get_output_embeddings().weight.detach().numpy().copy()
    for one, score in zip(batch, scores, strict=True):
        rows = slice(len(one.prompt_token_ids) - 1, None)
        np.testing.assert_allclose(
            log_softmax(score.hidden[rows] @ weight.T), log_softmax(logits_of(hf, one)), atol=1e-3
        )
        tokens = [*one.prompt_token_ids.tolist(), *one.token_ids.tolist()][:-1]
        with torch.no_grad():
            states = hf(torch.tensor([tokens]), output_hidden_states=True).hidden_states
        parts = np.split(score.auxiliary, len(engine.drafter.aux_layers), axis=1)
        for i, part in zip(engine.drafter.aux_layers, parts, strict=True):
            if i == engine.target.num_layers:  # transformers has the last one normed
                part = hf.model.norm(torch.tensor(part)).detach().numpy()
            np.testing.assert_allclose(part, states[i][0].numpy(), atol=1e-3)


def test_nothing_is_scored_of_nothing(engine):
    scores = engine.score([([1, 2], []), ([1], [2])])
    assert [len(score.logprobs) for score in scores] == [0, 1]
    assert engine.score([]) == []


def test_scores_of_a_prompt_that_is_cached(engine):
    """Pages of the prompt are found, and change nothing."""
    prompt, output = list(range(1, 25)), [3, 1, 4, 1, 5]
    (first,) = engine.score([(prompt, output)])
    before = engine.metrics().prefix_cache_hits
    (again,) = engine.score([(prompt, output)])
    assert engine.metrics().prefix_cache_hits > before
    np.testing.assert_allclose(first.logprobs, again.logprobs, atol=TOLERANCE)


# --- other weights --------------------------------------------------------------------------------


@pytest.fixture
def three_engines(build, checkpoints):
    """Engines without a drafter, and two with one, of a kind of model."""

    def make(kind):
        if kind == "llama":
            return build(drafts=False), build(), build()
        folder = checkpoints.mtp(checkpoints.target(kind, vocab_size=VOCAB)).folder
        config = {"method": "mtp", "num_speculative_tokens": K}
        return build(folder, drafts=False), *(build(folder, drafts=config) for _ in range(2))

    return make


@pytest.mark.parametrize("kind", ["llama", pytest.param("qwen3_5", marks=pytest.mark.slow)])
def test_drafts_change_nothing_across_updates(three_engines, kind):
    """Ten updates: no drafter, one that grows stale, one that is refreshed."""
    plain, stale, fresh = three_engines(kind)
    drafter = jax.tree.map(np.array, fresh.params.drafter)
    weights = jax.tree.map(np.array, plain.params.target)
    tokens = set()
    for step in range(1, 11):
        weights = noisy(weights, step)
        drafter = replace(
            drafter,
            fc=drafter.fc
            + 0.05 * np.sin(step + np.arange(len(drafter.fc)))[:, None].astype(np.float32),
        )
        for engine in plain, stale:
            engine.update_weights(weights, version=step)
        fresh.update_weights(weights, version=step, drafter=drafter)
        batches = [engine.generate(PROMPTS, SAMPLED) for engine in (plain, stale, fresh)]
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
    """Nothing compiles, nothing cached is found again, and a donated trainer does no harm."""
    engine = build()
    params = SamplingParams(temperature=0, max_tokens=20)
    for _ in range(2):
        before = engine.metrics().prefix_cache_hits
        engine.generate(PROMPTS, params)
    assert engine.metrics().prefix_cache_hits > before  # as they are without an update
    engine.score([([1, 2], [3])])
    weights = noisy(original, 1)
    kept = jax.tree.map(np.array, weights)
    held = jax.tree.leaves(weights)
    with compilations.none_expected():
        update = engine.update_weights(weights)
        before = engine.metrics().prefix_cache_hits
        batch = engine.generate(PROMPTS, params)
        engine.score([([1, 2], [3])])
        assert engine.metrics().prefix_cache_hits == before
    assert engine.metrics().num_compiles_after_warmup == 0
    assert update.version == engine.version == 1
    assert update.num_arrays == len(held) and update.seconds > 0
    assert update.num_bytes == sum(leaf.nbytes for leaf in held)
    jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.array, weights), kept)
    for leaf in held:  # as by a train step that donates
        leaf.delete()
    with LLM(
        engine.target, params=jax.tree.map(jnp.array, kept), show_progress=False, **SETTINGS
    ) as llm:
        expected = llm.generate(PROMPTS, params, use_tqdm=False)
    for _ in range(2):
        for one, other in zip(batch, expected, strict=True):
            assert one.token_ids.tolist() == other.outputs[0].token_ids
        batch = engine.generate(PROMPTS, params)


def test_a_checksum_is_that_of_the_same_weights(engine, original):
    from specjax.rl.weights import checksum

    assert engine.checksum() == checksum(original)
    weights = noisy(original, 2)
    engine.update_weights(weights)
    assert engine.checksum() == checksum(weights) != checksum(original)
    leaves, tree = jax.tree.flatten(original)
    for i in range(len(leaves)):
        bits = leaves[i].copy().view(np.uint32)
        bits.flat[-1] ^= 1
        other = [*leaves[:i], bits.view(np.float32), *leaves[i + 1 :]]
        assert checksum(tree.unflatten(other)) != checksum(original)
    flipped = [x[::-1] if x.shape[0] > 1 else x for x in leaves]
    assert checksum(tree.unflatten(flipped)) != checksum(original)


@pytest.mark.parametrize("kind", ["llama", "qwen3_5"])
def test_weights_under_hugging_face_names(checkpoints, compilations, kind):
    """A state_dict of transformers, an MTP module's tensors among them where there is one."""
    import copy

    target = checkpoints.target(kind, vocab_size=VOCAB)
    folder, config = target.folder, None
    if kind == "qwen3_5":
        folder = checkpoints.mtp(target).folder
        config = {"method": "mtp", "num_speculative_tokens": 2}
    with RolloutEngine(folder, speculative_config=config, **SETTINGS) as engine:
        hf = copy.deepcopy(target.hf)
        weights = dict(changed(hf, seed=1))
        if config:
            from safetensors.numpy import load_file

            tensors = load_file(folder / "model.safetensors")
            own = {n: x + 0.5 for n, x in tensors.items() if n.startswith("mtp.")}
            before = np.array(engine.params.drafter.fc)
            weights |= own
        params = SamplingParams(temperature=0, max_tokens=12)
        engine.generate(PROMPTS, params)  # which leaves pages, and states, of the old weights
        engine.update_weights(iter(weights.items()))
        assert engine.drafter_version == (1 if config else 0)
        if config:
            np.testing.assert_allclose(engine.params.drafter.fc, before + 0.5, atol=1e-6)
        import torch

        with compilations.none_expected():  # how names are laid out has been compiled
            engine.update_weights(weights)
            batch = engine.generate(PROMPTS, params)
        for one in batch:
            prompt = one.prompt_token_ids.tolist()
            tokens = list(prompt)
            for _ in range(len(one.token_ids)):
                with torch.no_grad():
                    tokens.append(int(hf(torch.tensor([tokens])).logits[0, -1].argmax()))
            assert one.token_ids.tolist() == tokens[len(prompt) :]


def test_weights_of_another_type_are_cast(engine, original):
    half = jax.tree.map(lambda x: jnp.array(x, jnp.bfloat16), original)
    engine.update_weights(half)
    for mine, theirs in zip(
        jax.tree.leaves(engine.params.target), jax.tree.leaves(half), strict=True
    ):
        assert mine.dtype == np.float32
        np.testing.assert_array_equal(mine, theirs.astype(np.float32))


def test_weights_in_the_hosts_memory_and_on_other_devices(engine, original):
    """As trainers offload them, and as they are split over a mesh."""
    device = jax.devices()[0]
    host = jax.sharding.SingleDeviceSharding(device, memory_kind="pinned_host")
    for seed, dtype in ((11, np.float32), (12, jnp.bfloat16)):
        other = jax.tree.map(lambda x, dtype=dtype: x.astype(dtype), noisy(original, seed))
        engine.update_weights(jax.device_put(other, host))
        for mine, theirs in zip(
            jax.tree.leaves(engine.params.target), jax.tree.leaves(other), strict=True
        ):
            assert mine.sharding.memory_kind == device.default_memory().kind
            np.testing.assert_array_equal(mine, theirs.astype(np.float32))
    assert len(engine.generate([PROMPTS[0]], SAMPLED)) == 2


def test_nested_mappings_with_the_same_paths(engine, original):
    from specjax.rl.weights import paths

    nested: dict = {}
    other = noisy(original, 9)
    for path, leaf in paths(other).items():
        *folders, last = path.split(".")
        at = nested
        for folder in folders:
            at = at.setdefault(int(folder) if folder.isdigit() else folder, {})
        at[last] = leaf
    engine.update_weights(nested)
    jax.tree.map(np.testing.assert_array_equal, engine.params.target, other)


def test_acceptance_falls_and_is_told_by_version(engine, original):
    """As the counters of the engine have it, cut where the weights changed."""
    first = engine.metrics()
    engine.generate(PROMPTS, replace(SAMPLED, temperature=0.0, n=1))
    second = engine.metrics()
    engine.update_weights(noisy(original, 4))
    engine.generate(PROMPTS, SAMPLED)
    before, now = engine.acceptance()[-2:]
    assert (before.version, now.version) == (engine.version - 1, engine.version)
    accepted = second.num_accepted_tokens - first.num_accepted_tokens
    rounds = second.num_drafts - first.num_drafts
    assert before.num_drafts == rounds
    assert before.mean_acceptance_length == pytest.approx(1 + accepted / rounds)
    assert before.num_tokens == second.num_generation_tokens - first.num_generation_tokens
    assert set(now.k_histogram) == {K} and now.mean_k == K
    assert now.acceptance_length(1) == 1 + now.acceptance_rate_per_pos[0]


# --- while something runs -------------------------------------------------------------------------


def long(n=1):
    return SamplingParams(n=n, temperature=1.0, max_tokens=40, ignore_eos=True)


def assert_drawn_by(rollout, weights, logits_of, hf):
    """Every token has the log-probability of the weights that its span names."""
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
def test_an_update_in_the_middle(engine, hf, logits_of, pause):
    """Between two steps of the thread that generates; versions say who drew what."""
    import copy

    old = engine.version
    weights = {old: copy.deepcopy(hf.state_dict()), old + 1: changed(hf, seed=7)}
    weights[old + 1] = copy.deepcopy(weights[old + 1])
    prompts = [*PROMPTS, *PROMPTS]
    lengths = [3, *[40] * 7]
    params = [replace(long(), max_tokens=n) for n in lengths]
    stream = engine.stream(prompts, params)
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
    for one in [*rollouts, *engine.generate(PROMPTS, long())]:
        assert_drawn_by(one, weights, logits_of, hf)
    assert {one.prompt_index for one in rollouts} == set(range(len(prompts)))


@pytest.mark.parametrize("pause", ["abort", "wait", "keep"])
def test_an_update_by_another_thread(engine, original, pause):
    """A trainer beside the thread that generates, again and again."""
    batches = []
    first = engine.version

    def run():
        for _ in range(3):
            batches.append(engine.generate([*PROMPTS, *PROMPTS], long()))

    thread = threading.Thread(target=run)
    thread.start()
    updates = 0
    while thread.is_alive():
        engine.update_weights(noisy(original, updates), pause=pause)
        updates += 1
        thread.join(0.05)
    assert updates > 1 and len(batches) == 3
    for one in (one for batch in batches for one in batch):
        assert sum(span.num_tokens for span in one.versions) == len(one.token_ids)
        versions = [span.version for span in one.versions]
        assert versions == sorted(versions) and all(first <= v <= engine.version for v in versions)
        assert len(one.token_ids) == 40 or (pause == "abort" and one.is_partial)
        assert pause == "keep" or len(versions) <= 1


def test_paused_and_resumed_by_another_thread(engine):
    engine.pause()
    done = []
    thread = threading.Thread(target=lambda: done.append(engine.generate(PROMPTS, SAMPLED)))
    thread.start()
    thread.join(0.3)
    assert thread.is_alive() and engine.metrics().num_requests_running == 0
    engine.resume()
    thread.join()
    assert len(done[0]) == 2 * len(PROMPTS)


def test_generating_while_paused_by_oneself_loses_nothing(engine):
    """It could never go on: an error, with what there was."""
    stream = engine.stream(PROMPTS, [replace(long(), max_tokens=n) for n in (2, 40, 40, 40)])
    rollouts = [next(stream)]
    engine.pause()
    with pytest.raises(RolloutError, match="resume"):
        for one in stream:
            rollouts.append(one)
    assert len(rollouts) == 4 and sum(one.is_partial for one in rollouts) == 3
    engine.resume()
    assert all(not one.is_partial for one in engine.generate([r for r in rollouts if r.is_partial]))
    engine.pause()
    with pytest.raises(RolloutError) as caught:
        engine.generate(PROMPTS, SAMPLED)
    assert len(caught.value.rollouts) == 2 * len(PROMPTS)
    with pytest.raises(ValueError, match="paused already"):
        engine.update_weights(engine.params.target, pause="wait")
    engine.resume()


def test_a_device_that_fails_loses_nothing(engine, monkeypatch):
    stream = engine.stream(PROMPTS, [replace(long(), max_tokens=n) for n in (2, 40, 40, 40)])
    rollouts = [next(stream)]

    def fail(*_):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(engine._engine, "_launch", fail)
    with pytest.raises(RolloutError, match="out of memory"):
        for one in stream:
            rollouts.append(one)
    monkeypatch.undo()
    assert len(rollouts) == 4
    finished = engine.generate([one for one in rollouts if one.is_partial])
    assert [len(one.token_ids) for one in finished] == [40] * 3


def test_a_device_that_fails_is_told_of_to_every_caller(engine, monkeypatch):
    """Not only to the one whose turn it was; whoever has all of its own hears nothing."""
    lengths = [replace(long(), max_tokens=n) for n in (2, 40, 40, 40)]
    done = engine.stream([PROMPTS[0]], replace(long(), max_tokens=2))
    mine, other = engine.stream(PROMPTS[:2], lengths[:2]), engine.stream(PROMPTS[2:], lengths[2:])
    rollouts, others = [next(mine)], []
    last = next(done)

    def fail(*_):
        raise RuntimeError("out of memory")

    def read(stream, into):
        with pytest.raises(RolloutError, match="out of memory"):
            for one in stream:
                into.append(one)

    thread = threading.Thread(target=lambda: others.append(next(other)))
    monkeypatch.setattr(engine._engine, "_launch", fail)
    thread.start()
    thread.join()
    monkeypatch.undo()
    read(mine, rollouts)
    read(other, others)
    assert len(rollouts) == 2 and len(others) == 2
    assert sum(one.is_partial for one in [*rollouts, *others]) == 3
    assert list(done) == [] and not last.is_partial
    assert len(engine.generate(PROMPTS, SAMPLED)) == 2 * len(PROMPTS)


@pytest.mark.parametrize("how", ["pause and abort", "sleep and abort", "update"])
def test_an_abort_wakes_whoever_waits(engine, original, how):
    batches = []
    thread = threading.Thread(target=lambda: batches.append(engine.generate(PROMPTS, long(4))))
    thread.start()
    while not engine.metrics().num_requests_running:
        time.sleep(0.01)
    if how == "sleep and abort":
        engine.sleep()
    else:
        engine.pause()
    if how == "update":
        engine.update_weights(original, pause="abort")
    else:
        engine.abort()
    thread.join(30)
    assert not thread.is_alive() and len(batches[0]) == 16
    assert any(one.is_partial for one in batches[0])
    engine.wake_up()
    engine.resume()


def test_labels_say_which_calls_end(engine):
    params = [replace(long(), max_tokens=n) for n in (2, 40)]
    mine = engine.stream(PROMPTS[:2], params, label="mine")
    other = engine.stream(PROMPTS[:2], params, label=("other", 1))
    rollouts, others = [next(mine)], [next(other)]
    engine.abort("mine")
    engine.abort("nobody's")
    rollouts += mine
    others += other
    assert [one.is_partial for one in rollouts] == [False, True]
    assert [one.is_partial for one in others] == [False, False]


def test_waking_up_is_not_going_on_after_a_pause(engine):
    engine.pause()
    engine.sleep()
    engine.wake_up()
    with pytest.raises(RolloutError, match="resume"):
        engine.generate(PROMPTS, SAMPLED)
    engine.wake_up()
    with pytest.raises(RolloutError, match="resume"):
        engine.generate(PROMPTS, SAMPLED)
    engine.resume()
    assert len(engine.generate(PROMPTS, SAMPLED)) == 2 * len(PROMPTS)


def test_a_stream_that_is_thrown_away_in_a_step(engine, monkeypatch):
    """As the garbage collector may, in the thread that has the turn."""
    streams = [engine.stream(PROMPTS, [replace(long(), max_tokens=n) for n in (1, 40, 40, 40)])]
    next(streams[0])
    step = engine._engine.step

    def collect():
        streams.clear()
        return step()

    monkeypatch.setattr(engine._engine, "step", collect)
    batch = engine.generate(PROMPTS, SAMPLED)
    assert len(batch) == 2 * len(PROMPTS) and not any(one.is_partial for one in batch)
    assert not engine._engine.has_work


def test_updates_of_many_threads(engine, hf):
    """Each sees whole weights, whatever others do at the time."""
    weights = {name: tensor.numpy() for name, tensor in hf.state_dict().items()}
    first, faults = engine.version, []

    def update():
        try:
            for _ in range(5):
                engine.update_weights(weights)
                assert engine.params.target is not None
        except Exception as error:
            faults.append(error)

    threads = [threading.Thread(target=update) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults and engine.version == first + 15


def test_an_update_that_fails_half_way(engine, original, monkeypatch):
    """Nothing is generated by weights of two versions, and another update mends them."""
    from specjax.rl.weights import Source

    stream = engine.stream(PROMPTS, [replace(long(), max_tokens=n) for n in (2, 40, 40, 40)])
    rollouts, version = [next(stream)], engine.version
    copy, seen = Source.copy, []

    def fail(self, *args):
        seen.append(self)
        if len(seen) == fails_at:
            raise MemoryError("no room")
        return copy(self, *args)

    monkeypatch.setattr(Source, "copy", fail)
    for fails_at in 1, 3:
        seen.clear()
        with pytest.raises(MemoryError):
            engine.update_weights(noisy(original, 1))
        assert engine.version == version
        if fails_at == 1:  # nothing has changed, and rollouts go on
            engine.score([([1], [2])])
    monkeypatch.undo()
    with pytest.raises(RuntimeError, match="half-way"):
        engine.generate(PROMPTS, SAMPLED)
    with pytest.raises(RuntimeError, match="half-way"):
        engine.score([([1], [2])])
    with pytest.raises(ValueError, match="half-way"):
        engine.update_weights(original, pause="wait")
    engine.update_weights(original)
    rollouts += stream
    assert [one.is_partial for one in rollouts] == [False] * 4
    assert {one.versions[-1].version for one in rollouts[1:]} == {version + 1}


# --- partial rollouts -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "params",
    [
        long(2),
        SamplingParams(temperature=0.9, top_p=0.8, repetition_penalty=1.2, max_tokens=40),
        SamplingParams(temperature=1.0, max_tokens=40, min_tokens=8, stop_token_ids=[1, 2, 3]),
    ],
)
def test_what_goes_on_is_what_would_have_come(build, params):
    """Tokens and log-probabilities, whether it was broken off and how often."""
    settings = [replace(params, max_tokens=n) for n in (8, 25, 40, 40)]
    whole = build(drafts=False, raw_logprobs=True).generate(PROMPTS, settings)
    engine = build(raw_logprobs=True)
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
    for one, other in zip(found, whole, strict=True):
        np.testing.assert_allclose(one.raw_logprobs, other.raw_logprobs, atol=TOLERANCE)
        assert one.versions == (Span(0, len(one.token_ids)),) and one.seed == other.seed


def test_a_partial_rollout_goes_on_under_later_weights(engine, original):
    stream = engine.stream(PROMPTS, [replace(long(), max_tokens=n) for n in (2, 40, 40, 40)])
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


# --- sleep ----------------------------------------------------------------------------------------


def live_bytes():
    return sum(x.nbytes for x in jax.live_arrays())


@pytest.mark.parametrize("level", [1, 2])
def test_sleeping_changes_nothing_and_frees_memory(target, speculation, level):
    def make():
        return RolloutEngine(target.folder, speculative_config=speculation, **SETTINGS)

    with make() as engine, make() as awake:
        for one in engine, awake:
            one.generate(PROMPTS, SAMPLED)  # leaves pages, which are gone after sleep
        weights = sum(x.nbytes for x in jax.tree.leaves(engine.params))
        state = sum(x.nbytes for x in jax.tree.leaves(engine._engine.programs.state))
        checksum = engine.checksum()
        before = live_bytes()
        engine.sleep(level)
        freed = before - live_bytes()
        assert freed == state + (weights if level == 2 else 0)
        engine.wake_up()
        assert live_bytes() == before
        assert engine.checksum() == checksum
        assert_same(engine.generate(PROMPTS, SAMPLED), awake.generate(PROMPTS, SAMPLED))


def test_asleep_in_the_middle(engine, original):
    """Rollouts wait, and are those of an engine that did not; weights may change meanwhile."""
    params = [replace(long(), max_tokens=n, seed=n) for n in (2, 40, 39, 38)]
    expected = engine.generate(PROMPTS, params)
    stream = engine.stream(PROMPTS, params)
    rollouts = [next(stream)]
    engine.sleep(1)
    engine.sleep(2)
    with pytest.raises(RuntimeError, match="asleep"):
        engine.resume()
    engine.wake_up()
    rollouts += stream
    assert_same(sorted(rollouts, key=lambda one: one.prompt_index), expected)
    engine.sleep(2)
    weights = noisy(original, 6)
    engine.update_weights(weights)
    assert all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(engine.params))
    engine.wake_up()
    jax.tree.map(np.testing.assert_array_equal, engine.params.target, weights)
    assert len(engine.generate(PROMPTS, params)) == 4


# --- what cannot be -------------------------------------------------------------------------------


def test_weights_that_do_not_fit_change_nothing(engine, original):
    """Everything that is wrong is named, at once."""
    from specjax.rl.weights import checksum, paths

    good = dict(paths(original))
    names = list(good)
    bad = dict(good)
    lost = [names[0], names[7]]
    for name in lost:
        del bad[name]
    bad[names[3]] = np.zeros((3, 5), np.float32)
    bad[names[4]] = good[names[4]].astype(np.int32)
    bad["layers.99.attention.qkv"] = np.zeros(3, np.float32)
    before, version = engine.checksum(), engine.version
    with pytest.raises(ValueError) as caught:
        engine.update_weights(bad)
    text = str(caught.value)
    for word in (*lost, "layers.99.attention.qkv", f"{names[3]} (expected", "found [3, 5]"):
        assert word in text
    assert f"{names[4]} (expected float32, found int32)" in text
    assert engine.checksum() == before and engine.version == version
    with pytest.raises(ValueError, match="twice"):
        engine.update_weights([(names[0], good[names[0]])] * 2)
    for nonsense in (5, "weights", [3], [("a", "b")], None):
        with pytest.raises(ValueError, match="weights"):
            engine.update_weights(nonsense)
    drafter = checksum(engine.params.drafter)
    with pytest.raises(ValueError, match="fc"):
        engine.update_weights(original, drafter={"fc.weight": np.zeros(2, np.float32)})
    assert checksum(engine.params.drafter) == drafter
    assert engine.checksum() == before and engine.version == version


def test_weights_that_are_no_more(engine, original):
    """Donated to the trainer's own step, most often."""
    weights = noisy(original, 1)
    before, leaves = engine.checksum(), jax.tree.leaves(weights)
    leaves[2].delete()
    with pytest.raises(ValueError, match="deleted, or donated"):
        engine.update_weights(weights)
    shapes = jax.eval_shape(lambda x: x, original)
    with pytest.raises(ValueError, match="not an array"):
        engine.update_weights(shapes)
    assert engine.checksum() == before
    assert len(engine.generate(PROMPTS, SAMPLED)) == 2 * len(PROMPTS)


def test_a_draft_vocabulary_is_compiled_in(engine, speculation):
    from safetensors.numpy import load_file

    drafter = jax.tree.map(np.array, engine.params.drafter)
    version = engine.drafter_version
    with pytest.raises(ValueError, match="target_ids"):
        engine.update_drafter(replace(drafter, target_ids=drafter.target_ids[::-1]))
    with pytest.raises(ValueError, match="target_ids"):
        engine.update_drafter(replace(drafter, target_ids=drafter.target_ids[:-1]))
    (file,) = Path(speculation["model"]).glob("*.safetensors")
    tensors = load_file(file)
    for other in (tensors["d2t"][::-1].copy(), tensors["d2t"][:-1]):
        with pytest.raises(ValueError, match="draft vocabulary"):
            engine.update_drafter(tensors | {"d2t": other})
    assert engine.drafter_version == version
    engine.update_drafter(tensors)
    assert engine.drafter_version == version + 1


def test_names_of_hugging_face_that_do_not_fit(engine, hf):
    weights = dict(hf.state_dict())
    lost = "model.layers.0.self_attn.k_proj.weight"
    del weights[lost]
    weights["model.layers.0.self_attn.x_proj.weight"] = weights["model.norm.weight"]
    weights["model.norm.weight"] = weights["model.norm.weight"][:-1]
    before = engine.checksum()
    with pytest.raises(ValueError) as caught:
        engine.update_weights(weights)
    for word in (lost, "x_proj", "model.norm.weight (expected"):
        assert word in str(caught.value)
    assert engine.checksum() == before


@pytest.mark.parametrize("version", [0, -1, 1.5, "2", True])
def test_versions_rise(engine, original, version):
    now = engine.version
    with pytest.raises(ValueError, match="version"):
        engine.update_weights(original, version)
    with pytest.raises(ValueError, match=f"version={now}"):
        engine.update_weights(original, now)
    assert engine.version == now


@pytest.mark.parametrize(
    "samples, word",
    [
        ([([1, 2], [VOCAB])], "32"),
        ([([1, -1], [3])], "-1"),
        ([([], [3])], "empty"),
        ([([1], [2] * 64)], "64 tokens"),
        ([[1, 2, 3]], "sample 0"),
        ([([1], [2]), 7], "sample 1"),
        ([([1], [1.5])], "integers"),
    ],
    ids=str,
)
def test_tokens_that_cannot_be_scored(engine, samples, word):
    before = engine.metrics().num_prompt_tokens
    with pytest.raises(ValueError, match=word):
        engine.score(samples)
    assert engine.metrics().num_prompt_tokens == before


def test_parameters_that_are_not_for_rollouts(engine):
    for name in "logprobs", "prompt_logprobs":
        with pytest.raises(ValueError, match=name):
            engine.generate(PROMPTS, SamplingParams(**{name: 1}))
    with pytest.raises(ValueError, match="SamplingParams"):
        engine.generate(PROMPTS, {"temperature": 1})
    with pytest.raises(ValueError, match="pause='stop'"):
        engine.pause("stop")
    with pytest.raises(ValueError, match="level=3"):
        engine.sleep(3)
    batch = engine.generate([PROMPTS[0]], SamplingParams(max_tokens=2))
    with pytest.raises(ValueError, match="has ended"):
        engine.generate(batch)
    stream = engine.stream(PROMPTS, long(2))
    with pytest.raises(ValueError, match="two calls"):
        engine.generate([batch[0], [1, 2]])
    stream.close()


def test_settings_that_a_rollout_engine_makes_itself(target):
    for name, value in {"logprobs_mode": "raw", "always_logprobs": True}.items():
        with pytest.raises(ValueError, match=name):
            RolloutEngine(target.folder, **{name: value}, **SETTINGS)
    with pytest.raises(ValueError, match="raw_logprobs"):
        RolloutEngine(target.folder, raw_logprobs="yes", **SETTINGS)
    synthetic = {
        "method": "ngram",
        "num_speculative_tokens": 2,
        "verification": "synthetic",
        "synthetic_acceptance_length": 2,
    }
    with pytest.raises(ValueError, match="synthetic"):
        RolloutEngine(target.folder, speculative_config=synthetic, **SETTINGS)
    with pytest.raises(TypeError, match="speed"):
        RolloutEngine(target.folder, speed="high", **SETTINGS)


def test_drafters_without_weights(build):
    with pytest.raises(ValueError, match="no drafter"):
        build(drafts=False).update_drafter({})
    ngram = build(drafts={"method": "ngram", "num_speculative_tokens": 2})
    with pytest.raises(ValueError, match="no drafter"):
        ngram.update_drafter({})


def test_closed(target):
    engine = RolloutEngine(target.folder, **SETTINGS)
    stream = engine.stream([[1]], long())
    engine.close()
    engine.close()
    for call in (
        lambda: engine.generate([[1]]),
        lambda: next(stream),
        lambda: engine.score([([1], [2])]),
        lambda: engine.sleep(),
        lambda: engine.abort(),
        lambda: engine.params,
        lambda: engine.update_weights({}),
    ):
        with pytest.raises(RuntimeError, match="closed"):
            call()


def test_a_policy_hears_of_other_weights(build, original):
    engine = build()
    told = []

    class Policy(StaticPolicy):
        def target_changed(self):
            told.append("target")

        def drafter_changed(self):
            told.append("drafter")

    engine._engine.scheduler.policy = Policy(K)
    engine.update_weights(original)
    engine.update_drafter(engine.params.drafter)
    engine.update_weights(original, drafter=engine.params.drafter)
    assert told == ["target", "drafter", "target", "drafter"]
