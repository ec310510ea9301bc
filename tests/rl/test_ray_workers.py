"""Two workers on two cores give the results of one engine, also if workers die."""

from dataclasses import replace

import jax
import numpy as np
import pytest
from support.engines import SIZES, K
from support.ray_cluster import ray_cluster
from support.rollouts import assert_same, copied

from specjax.rl.engine import RolloutEngine
from specjax.rl.history import RolloutHistory
from specjax.rl.ray_workers import RayRollouts
from specjax.sampling_params import SamplingParams

# By day, tests/ray_llm has workers of a cluster, and test_ray_failures.py has these without one.
pytestmark = pytest.mark.nightly

PARAMS = SamplingParams(max_tokens=20)


@pytest.fixture(scope="module")
def ray():
    with ray_cluster() as found:
        yield found


@pytest.fixture(scope="module")
def engines(ray, checkpoints):
    """One engine, two workers, and their original weights."""
    target = checkpoints.target()
    folder, head = checkpoints.with_letters(target.folder), checkpoints.eagle3(target).folder
    config = {"method": "eagle3", "model": str(head), "num_speculative_tokens": K}
    config |= {"with": ["suffix"]}
    options = {**SIZES, "seed": 5, "speculative_config": config}
    with (
        RolloutEngine(folder, **options) as single,
        RayRollouts(folder, num_workers=2, group_size=2, **options) as workers,
    ):
        yield single, workers, copied(single.params.target)


@pytest.fixture
def original(engines):
    return engines[2]


@pytest.fixture
def single(engines, original):
    """The single engine, reset to its original state except for its version."""
    engine, workers, _ = engines
    engine.update_weights(original, max(engine.version, workers.version) + 1)
    engine._starts.num_prompts = 0
    return engine


@pytest.fixture
def workers(engines, single, original):
    """The two workers, reset to their original state, with the version of `single`."""
    workers = engines[1]
    workers.update_weights(original, single.version)
    workers._num_prompts = 0
    return workers


def test_outputs_are_those_of_one_engine(workers, single, ragged_prompts):
    prompts = ragged_prompts(5, 9, 3, 7, 4, 6, 8)
    params = [replace(PARAMS, n=1 + i % 3, max_tokens=5 + 5 * i) for i in range(7)]
    params[2] = replace(params[2], seed=11)
    history = RolloutHistory()
    for _ in range(2):  # the second call goes on with other seeds
        found = workers.generate(prompts, params, history=history)
        assert_same(found, single.generate(prompts, params))
    assert len(history) == 2 * len(found)
    given = replace(PARAMS, seed=3, max_tokens=30)  # which gives the same each time
    first, *others = (workers.generate(prompts, given, history=history) for _ in range(3))
    for again in others:
        assert_same(again, first)
    assert sum(m.accepted_tokens_per_source.get("history", 0) for m in workers.metrics()) > 50
    single._starts.num_prompts = workers._num_prompts
    texts, pairs = ["Hello", "World", "!"], replace(PARAMS, n=2)
    assert_same(workers.generate(texts, pairs), single.generate(texts, pairs))
    assert_same([*workers.stream({"prompt_token_ids": [1, 2]})], [*single.stream([[1, 2]])])
    assert sum(m.num_generation_tokens > 0 for m in workers.metrics()) == 2
    assert all(by_version[-1].num_tokens for by_version in workers.acceptance())
    rollouts = single.generate(prompts, PARAMS)
    pairs = [(one.prompt_token_ids, one.token_ids) for one in rollouts]
    for samples, given in (rollouts, None), (pairs, SamplingParams(temperature=0.5)):
        found = workers.score(samples, given, features=True)
        for one, other in zip(found, single.score(samples, given, features=True), strict=True):
            np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-4)
            np.testing.assert_allclose(one.hidden, other.hidden, atol=1e-4)


def test_aborted_rollouts_go_on_as_in_one_engine(workers, single, ragged_prompts):
    prompts, params = ragged_prompts(5, 9, 3, 7), replace(PARAMS, n=2, max_tokens=30)
    partial = []
    for rollout in single.stream(prompts, [replace(params, max_tokens=4), *[params] * 3]):
        partial.append(rollout)
        single.abort()
    partial = [rollout for rollout in partial if rollout.is_partial]
    assert len(partial) > 2
    assert_same(workers.generate(partial), single.generate(partial))
    workers._num_prompts += len(prompts)  # as by itself; what goes on takes no numbers
    assert_same(workers.generate(prompts, params), single.generate(prompts, params))


def test_bad_input_is_told_of_as_by_one_engine(workers, single):
    before = [one.num_prompt_tokens for one in workers.metrics()]
    samples = [([1, 2], [3])] * 5 + [([1, 2], [1000])]
    for engine in workers, single:
        with pytest.raises(ValueError, match="^sample 5: its output: token id 1000 is outside"):
            engine.score(samples)
        with pytest.raises(ValueError, match="sampling_params=3 must be a SamplingParams"):
            engine.score(samples, 3)
        with pytest.raises(ValueError, match="prompt 2: token id 1000 is outside the vocabulary"):
            engine.generate([[1], [2], [1000]], PARAMS)  # which takes no numbers
        with pytest.raises(ValueError, match="has 2 entries for 1 prompts"):
            engine.generate([[1]], [PARAMS] * 2)
    assert [one.num_prompt_tokens for one in workers.metrics()] == before
    assert_same(workers.generate([[1], [2]], PARAMS), single.generate([[1], [2]], PARAMS))


def scaled(weights, factor, dtype="float32"):
    return jax.tree.map(lambda x: (x * factor).astype(dtype), weights)


def test_weights_reach_all_workers_and_those_that_replace_them(
    ray, workers, single, original, ragged_prompts
):
    weights = scaled(original, 1.2)
    single.update_weights(weights)
    update = workers.update_weights(weights)
    assert update.version == workers.version == single.version
    assert workers.checksums() == [single.checksum()] * 2
    workers.update_drafter(single.params.drafter)
    workers.sleep(2)
    ray.kill(workers._pool.workers[1])
    with pytest.raises(RuntimeError, match="asleep; call wake_up"):
        workers.generate([[1]], PARAMS)
    workers.wake_up()
    assert workers.checksums() == [single.checksum()] * 2
    prompts = ragged_prompts(5, 6, 7, 8)
    assert_same(workers.generate(prompts, PARAMS), single.generate(prompts, PARAMS))
    wrong = {"fc.weight": np.zeros((2, 2), np.float32)}
    for refused, words in (
        ({"weights": weights, "version": single.version}, "must be above"),
        ({"weights": {"lm_head": weights.lm_head}}, "missing"),
        ({"weights": original, "drafter": wrong}, "drafter's weights do not fit"),
    ):
        with pytest.raises(ValueError, match=words):
            workers.update_weights(**refused)
        assert workers.version == single.version
    assert workers.checksums() == [single.checksum()] * 2
    half = scaled(original, 1.0, "bfloat16")
    single.update_weights(half)
    workers.update_weights(half)
    assert workers.checksums() == [single.checksum()] * 2


def test_what_dead_workers_had_is_done_by_others(ray, workers, single, ragged_prompts):
    prompts = ragged_prompts(*range(3, 15))
    params = [replace(PARAMS, n=2, max_tokens=30)] * len(prompts)
    expected = single.generate(prompts, params)
    found = []
    for rollout in workers.stream(prompts, params):
        if not found:  # one of them is in the middle of its work, the other about to begin
            for worker in list(workers._pool.workers):
                ray.kill(worker)
        found.append(rollout)
    assert_same(sorted(found, key=lambda one: (one.prompt_index, one.sample_index)), expected)


def test_leaving_a_stream_leaves_the_others(workers, single, ragged_prompts):
    prompts = ragged_prompts(3, 4, 5, 6, 7, 8)
    params = [replace(PARAMS, max_tokens=n) for n in (1, 1, 50, 50, 9, 9)]
    expected = single.generate(prompts, params)
    kept = workers.stream(prompts, params)
    found = [next(kept)]  # the second worker is busy with the long ones of both
    for _ in workers.stream(prompts, params):
        break  # which ends what runs for it alone
    found += kept
    assert all(m.num_requests_running == 0 for m in workers.metrics())
    assert_same(sorted(found, key=lambda one: one.prompt_index), expected)


def test_what_workers_or_the_cluster_refuse_is_refused_at_construction(ray, checkpoints):
    folder = checkpoints.target().folder
    with pytest.raises(ValueError, match="max_num_seqs=0"):
        RayRollouts(folder, num_workers=1, ray_options={"num_cpus": 0}, max_num_seqs=0)
    with pytest.raises(ValueError, match=r"has \{'CPU': 2.0\} on 1 node\(s\), enough for 2"):
        RayRollouts(folder, num_workers=8)
