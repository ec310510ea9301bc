"""The worker of a `RayLLM`, without Ray and on a simulated device."""

import asyncio
import time
from dataclasses import replace
from types import MappingProxyType

import jax
import numpy as np
import pytest
from support.engines import SIZES, patched, simulated_engines
from support.scripts import HashScript
from support.texts import VOCAB

from specjax import RequestOutputKind, SamplingParams
from specjax.ray.worker import RayWorker
from specjax.rl.ray_worker import NotBuilt, WorkerFailed, WorkerState
from specjax.rl.weights import ArraySource

LONG = SamplingParams(max_tokens=40, seed=3, logprobs=1, ignore_eos=True)


class SlowScript(HashScript):
    """A slow script, so that a request is still running when its caller has some tokens."""

    def following(self, *arguments):
        """See `Script`."""
        time.sleep(0.003)
        return super().following(*arguments)


@pytest.fixture
def make(letters):
    """Return a function that makes a worker. The workers end with the test."""
    made = []

    def make(weights=None, version=0, corpora=MappingProxyType({}), **options):
        state = WorkerState(version=version, corpora=corpora)
        made.append(RayWorker(letters, {**SIZES, **options}, state, weights, None))
        return made[-1]

    with simulated_engines(SlowScript(VOCAB)):
        yield make
    for worker in made:
        if hasattr(worker, "_llm"):
            worker._llm.shutdown()


async def outputs_of(worker, params=LONG, before=None, at=None, then=None):
    found = []
    async for output in worker.stream([4, 5, 6], params, "0", before):
        found.append(output.outputs[0])
        if len(found) == at:
            await then()
    return found


def engine_of(worker):
    return worker._llm._llm.engine


def target_of(worker, factor=1.0):
    return jax.tree.map(lambda x: np.array(x) * factor, engine_of(worker).params.target)


def test_a_request_goes_on_where_another_worker_left_it(make):
    first, second = make(), make(seed=9)
    whole = asyncio.run(outputs_of(first))
    deltas = replace(LONG, output_kind=RequestOutputKind.DELTA)
    before, last = whole[len(whole) // 3], whole[-1]
    rest = asyncio.run(outputs_of(second, deltas, before))
    count = len(before.token_ids)
    assert 0 < count < LONG.max_tokens == len(last.token_ids)
    assert [t for one in rest for t in one.token_ids] == last.token_ids[count:]
    assert "".join(one.text for one in rest) == last.text[len(before.text) :]
    assert [entry for one in rest for entry in one.logprobs] == last.logprobs[count:]
    assert rest[-1].cumulative_logprob == pytest.approx(last.cumulative_logprob)
    with pytest.raises(ValueError, match="continued as one sample"):
        asyncio.run(outputs_of(second, replace(deltas, n=2), before))


@pytest.mark.slow
def test_weights_change_between_two_steps(make):
    """Tokens of this simulated device depend on the weights."""
    worker = make()
    old = asyncio.run(outputs_of(worker))[-1]
    new = target_of(worker, 1.5)

    async def update():
        update, _ = await worker.update("update_weights", new, 4, drafter=None)
        assert update.version == worker.version() == 4
        assert update.num_arrays == len(jax.tree.leaves(new))

    mixed = asyncio.run(outputs_of(worker, at=5, then=update))
    count = len(mixed[4].token_ids)
    assert mixed[-1].token_ids[:count] == old.token_ids[:count]
    assert mixed[-1].token_ids != old.token_ids and mixed[-1].finish_reason == "length"
    later = asyncio.run(outputs_of(make(new, 4)))[-1]
    assert later.token_ids == asyncio.run(outputs_of(worker))[-1].token_ids
    with pytest.raises(ValueError, match="must be above the current one, 4"):
        asyncio.run(worker.update("update_weights", new, 4, drafter=None))
    assert worker.version() == 4


def test_a_new_worker_has_the_corpora_of_the_others(make):
    config = {"method": "suffix", "num_speculative_tokens": 3}
    worker = make(speculative_config=config, corpora={"a": [[1, 2, 3]], "b": ["text"]})
    with pytest.raises(ValueError, match="corpus 'b' exists"):
        asyncio.run(worker.call("add_corpus", "b", [[4]]))
    asyncio.run(worker.call("remove_corpus", "a"))
    corpora = engine_of(worker).scheduler.suggester.named("corpus")
    assert corpora.names == ["b"]


def test_no_token_comes_from_weights_of_two_versions(make):
    worker = make()
    copies = iter([ArraySource.copy])

    def copy(source, *arguments):
        return next(copies)(source, *arguments)  # fails at the second array

    async def update():
        with patched(ArraySource, "copy", copy), pytest.raises(WorkerFailed, match="half-way"):
            await worker.update("update_weights", target_of(worker, 2.0), 1, drafter=None)

    with pytest.raises(WorkerFailed, match="half-way"):
        asyncio.run(outputs_of(worker, at=2, then=update))
    with pytest.raises(WorkerFailed, match="half-way"):
        asyncio.run(worker.call("metrics"))


def test_what_fails_is_told_apart(make):
    worker = make()
    with pytest.raises(ValueError, match="outside the vocabulary"):
        asyncio.run(worker.call("check_requests", [[1], [VOCAB]], [LONG] * 2))
    for program in "decode", "read":
        engine_of(worker).programs.to_fail.append(program)
        with pytest.raises(WorkerFailed, match="was to fail"):
            asyncio.run(outputs_of(worker))
    assert len(asyncio.run(outputs_of(worker))[-1].token_ids) == LONG.max_tokens

    async def fail_to_land():
        engine_of(worker).programs.to_fail.append("read")
        await worker.update("update_weights", target_of(worker), 1, drafter=None)

    with pytest.raises(WorkerFailed, match="was to fail"):
        asyncio.run(outputs_of(worker, at=3, then=fail_to_land))
    with pytest.raises(NotBuilt, match="max_num_seqs"):
        asyncio.run(make(max_num_seqs=-1).call("metrics"))
