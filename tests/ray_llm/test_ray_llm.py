"""Two workers, by night of two devices each, give one LLM's results, also if workers die."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import chain

import jax
import numpy as np
import pytest
from support.engines import SIZES, K, generate
from support.ray_cluster import ray_cluster

from specjax import LLM, RayLLM, RequestOutputKind, SamplingParams

pytestmark = pytest.mark.slow

LONG = SamplingParams(temperature=0.8, max_tokens=100, ignore_eos=True)
DELTA = RequestOutputKind.DELTA


@pytest.fixture(scope="module")
def ray():
    with ray_cluster(num_devices=2) as found:
        yield found


@pytest.fixture(scope="module", params=[1, pytest.param(2, marks=pytest.mark.nightly)])
def both(request, ray, checkpoints):
    """An LLM, and a `RayLLM` with two workers."""
    target = checkpoints.target()
    folder, head = checkpoints.with_letters(target.folder), checkpoints.eagle3(target).folder
    config = {"method": "eagle3", "model": str(head), "num_speculative_tokens": K}
    config |= {"with": ["suffix"]}
    options = {**SIZES, "seed": 5, "speculative_config": config}
    with (
        RayLLM(
            folder, data_parallel_size=2, tensor_parallel_size=request.param, **options
        ) as workers,
        LLM(folder, **options) as single,
    ):
        yield single, workers


@pytest.fixture
def single(both):
    both[0]._next_id = 0
    return both[0]


@pytest.fixture
def workers(both):
    both[1]._num_requests = 0
    return both[1]


def texts_and_tokens(outputs):
    return [[(one.text, one.token_ids, one.finish_reason) for one in x.outputs] for x in outputs]


def assert_same_logprobs(outputs, expected):
    assert [len(one) for one in outputs] == [len(one) for one in expected]
    for one, other in zip(chain(*outputs), chain(*expected), strict=True):
        assert one.keys() == other.keys()
        found = [[entry[token].logprob for token in one] for entry in (one, other)]
        np.testing.assert_allclose(*found, atol=1e-4)


def use(single, weights):
    target = jax.tree.map(jax.numpy.array, weights)
    single.engine.params = single.engine.params._replace(target=target)
    single.reset_prefix_cache()


async def stream(workers, prompt, params, at=None, then=None):
    """Return all outputs of a stream. After `at` tokens, call `then`."""
    outputs, num_tokens = [], 0
    async for output in workers.generate_stream(prompt, params):
        outputs.append(output)
        num_tokens += len(output.outputs[0].token_ids)
        if then is not None and num_tokens >= at:
            then()
            then = None
    assert then is None and outputs[-1].finished
    return outputs


def test_a_batch_is_that_of_one_llm(workers, single, ragged_prompts):
    prompts = [*ragged_prompts(5, 9, 3, 7, 4, 6), "Hello"]
    params = [
        SamplingParams(n=1 + i % 3, temperature=0.7 * (i % 2), max_tokens=5 + 5 * i)
        for i in range(7)
    ]
    params[2] = replace(params[2], seed=11)
    params[4] = replace(params[4], logprobs=2, prompt_logprobs=1)
    for _ in range(2):  # the second call goes on with other seeds
        outputs, expected = workers.generate(prompts, params), generate(single, prompts, params)
        assert texts_and_tokens(outputs) == texts_and_tokens(expected)
        assert [one.request_id for one in outputs] == [one.request_id for one in expected]
        assert [one.prompt_token_ids for one in outputs] == [
            one.prompt_token_ids for one in expected
        ]
        found, wanted = outputs[4], expected[4]
        assert_same_logprobs(
            [found.prompt_logprobs[1:], found.outputs[1].logprobs],
            [wanted.prompt_logprobs[1:], wanted.outputs[1].logprobs],
        )
    assert all(metrics.num_generation_tokens for metrics in workers.metrics())
    assert workers.generate([]) == []


def test_workers_that_are_killed_in_the_middle_of_streams(ray, workers, single):
    """Requests continue after the shown tokens, with log-probabilities.

    Requests with two samples start again.
    """

    def kill():
        for worker in workers._pool.workers:
            ray.kill(worker)

    params = [
        replace(LONG, logprobs=0),
        replace(LONG, output_kind=DELTA),
        replace(LONG, n=2, max_tokens=60),
        replace(LONG, output_kind=RequestOutputKind.FINAL_ONLY),
    ]

    async def run():
        calls = [stream(workers, [7, 2, i], one) for i, one in enumerate(params[1:], start=1)]
        return await asyncio.gather(stream(workers, [7, 2, 0], params[0], 20, kill), *calls)

    before = list(workers._pool.workers)
    workers.add_corpus("outputs", [[7, 2, 5] * 9])
    cumulative, deltas, samples, final = asyncio.run(run())
    assert not set(before) & set(workers._pool.workers)
    with pytest.raises(ValueError, match="corpus 'outputs' exists"):  # also in new workers
        workers.add_corpus("outputs", [[1]])
    workers.remove_corpus("outputs")
    assert not workers._pool.state.corpora
    wholes = [replace(one, output_kind=RequestOutputKind.CUMULATIVE) for one in params]
    expected = generate(single, [[7, 2, i] for i in range(4)], wholes)
    lasts = [cumulative[-1], samples[-1], *final]
    assert texts_and_tokens(lasts) == texts_and_tokens([expected[0], *expected[2:]])
    assert_same_logprobs([cumulative[-1].outputs[0].logprobs], [expected[0].outputs[0].logprobs])
    lengths = [len(one.outputs[0].token_ids) for one in cumulative]
    assert lengths == sorted(lengths) and len(lengths) > 10
    whole = expected[1].outputs[0]
    assert [t for one in deltas for t in one.outputs[0].token_ids] == whole.token_ids
    assert "".join(one.outputs[0].text for one in deltas) == whole.text
    assert [one.finished for one in cumulative].count(True) == 1  # every request ends once


def test_weights_reach_all_workers_and_say_their_version(ray, workers, single):
    original = jax.tree.map(np.array, single.engine.params.target)
    weights = jax.tree.map(lambda x: x * 1.2, original)
    first = workers.generate([[1, 2, 3]], LONG)
    with pytest.raises(ValueError, match="must be above the current one, 0"):
        workers.update_weights(weights, 0)
    with pytest.raises(ValueError, match="do not fit"):
        workers.update_weights({"nonsense": np.zeros(3)})
    assert workers.versions() == [0, 0]

    async def update_meanwhile():
        """Update weights while requests run. Their later tokens come from the new weights."""
        calls = [stream(workers, [1, 2, 3], LONG) for _ in range(4)]
        runs = asyncio.gather(*calls)
        await asyncio.sleep(0.05)
        update = await asyncio.to_thread(workers.update_weights, weights, 3)
        return update, await runs

    update, runs = asyncio.run(update_meanwhile())
    assert update.version == 3 and workers.versions() == [3, 3]
    assert [len(run[-1].outputs[0].token_ids) for run in runs] == [LONG.max_tokens] * 4
    ray.kill(workers._pool.workers[1])  # the next one has the new weights
    use(single, weights)
    single._next_id = workers._num_requests
    prompts = [[1, 2, 3], [4, 5]]
    outputs, expected = workers.generate(prompts, LONG), generate(single, prompts, LONG)
    assert texts_and_tokens(outputs) == texts_and_tokens(expected) != texts_and_tokens(first)
    assert workers.versions() == [3, 3]
    assert workers.update_weights(original).version == 4
    use(single, original)


def test_who_leaves_a_stream_or_a_batch_ends_its_requests(workers):
    async def leave():
        async for _ in workers.generate_stream([3, 4], LONG):
            break
        task = asyncio.create_task(stream(workers, [3, 4], LONG))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        for _ in range(100):
            if not any(
                one.num_requests_running for one in await asyncio.to_thread(workers.metrics)
            ):
                return
            await asyncio.sleep(0.05)
        raise AssertionError("requests run on")

    asyncio.run(leave())
    assert not +workers._num_samples


def test_bad_input_is_refused_before_anything_runs(ray, workers, both):
    before = [one.num_prompt_tokens for one in workers.metrics()]
    with pytest.raises(ValueError, match="prompt 1: token id 1000 is outside the vocabulary"):
        workers.generate([[1], [1000]], LONG)
    with pytest.raises(ValueError, match="has 2 entries for 1 prompts"):
        workers.generate([[1]], [LONG] * 2)
    with pytest.raises(ValueError, match="logits_processors are compiled"):
        workers.generate([[1]], replace(LONG, logits_processors=[lambda *x: x[-1]]))
    with pytest.raises(ValueError, match="outside the vocabulary"):
        asyncio.run(stream(workers, [1000], LONG))
    assert [one.num_prompt_tokens for one in workers.metrics()] == before
    with pytest.raises(TypeError, match="unknown option 'max_seqs'"):
        RayLLM("demo-llama", data_parallel_size=2, max_seqs=3)
    with pytest.raises(ValueError, match="data_parallel_size=9 of"):
        RayLLM("demo-llama", data_parallel_size=9)
    with ThreadPoolExecutor(1) as pool:  # threads may share it
        call = pool.submit(workers.generate, [[1, 2]], LONG)
        assert texts_and_tokens(workers.generate([[1, 2]], replace(LONG, seed=1)))
        assert call.result()[0].finished
