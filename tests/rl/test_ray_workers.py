"""Two workers on two cores give what one engine gives, whatever happens to them.

What workers fail at is tried with a Ray of one thread, whose actors have engines that fail on call.
"""

import os
import sys
import threading
import warnings
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from specjax.device.models.registry import load_model
from specjax.rl import ray_workers
from specjax.rl.engine import RolloutEngine
from specjax.rl.ray_workers import RayRollouts, WorkersDied
from specjax.rl.rollouts import Rollout, RolloutBatch, RolloutError
from specjax.rl.weights import WeightUpdate
from specjax.sampling_params import SamplingParams

ROOT = Path(__file__).parents[2]
OPTIONS = {"max_num_seqs": 4, "max_model_len": 64, "page_size": 4, "num_pages": 128, "seed": 5}
PARAMS = SamplingParams(max_tokens=20)


@pytest.fixture(scope="module")
def ray():
    found = pytest.importorskip("ray")
    environment = {
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": str(ROOT),
        "JAX_COMPILATION_CACHE_DIR": str(ROOT / ".cache" / "ray"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("ignore")  # of Ray's own start
        patch.setenv("RAY_worker_niceness", "0")  # else they wait for all else that runs
        found.init(
            num_cpus=2,
            include_dashboard=False,
            log_to_driver=False,
            configure_logging=False,
            runtime_env={"env_vars": environment},
        )
    yield found
    found.shutdown()


@pytest.fixture(scope="module")
def folder(checkpoints):
    target = checkpoints.target()
    return checkpoints.with_letters(target.folder)


@pytest.fixture(scope="module")
def speculation(checkpoints):
    head = checkpoints.eagle3(checkpoints.target())
    return {"method": "eagle3", "model": str(head.folder), "num_speculative_tokens": 2}


@pytest.fixture(scope="module")
def original(folder):
    return load_model(folder, np.dtype("float32"))[1]


@pytest.fixture(scope="module")
def engines(ray, folder, speculation):
    with (
        RolloutEngine(folder, speculative_config=speculation, **OPTIONS) as single,
        RayRollouts(
            folder, num_workers=2, group_size=2, speculative_config=speculation, **OPTIONS
        ) as workers,
    ):
        yield single, workers


@pytest.fixture
def single(engines, original):
    """One engine as if it were new, but for its version."""
    engine, workers = engines
    engine.update_weights(original, max(engine.version, workers.version) + 1)
    engine._starts.num_prompts = 0
    return engine


@pytest.fixture
def workers(engines, single, original):
    """Two workers as if they were new, with the version of `single`."""
    workers = engines[1]
    workers.update_weights(original, single.version)
    workers._num_prompts = 0
    return workers


def facts(rollouts):
    """All of rollouts but log-probabilities, whose last bits depend on what shares a step."""
    return [
        (
            one.prompt_token_ids.tolist(),
            one.token_ids.tolist(),
            one.versions,
            one.finish_reason,
            one.text,
            one.params,
            one.seed,
            one.prompt_index,
            one.sample_index,
        )
        for one in rollouts
    ]


def assert_same(found, expected):
    assert facts(found) == facts(expected)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-4)


@pytest.mark.slow
def test_outputs_are_those_of_one_engine(workers, single, ragged_prompts):
    prompts = ragged_prompts(5, 9, 3, 7, 4, 6, 8)
    params = [replace(PARAMS, n=1 + i % 3, max_tokens=5 + 5 * i) for i in range(7)]
    params[2] = replace(params[2], seed=11)
    for _ in range(2):  # the second call goes on with other seeds
        assert_same(workers.generate(prompts, params), single.generate(prompts, params))
    for engine in workers, single:  # what is refused takes no numbers
        with pytest.raises(ValueError, match="token id 1000"):
            engine.generate([[1], [1000]])
    texts, pairs = ["Hello", "World", "!"], replace(PARAMS, n=2)
    assert_same(workers.generate(texts, pairs), single.generate(texts, pairs))
    assert_same(workers.stream({"prompt_token_ids": [1, 2]}), single.stream([[1, 2]]))
    assert sum(m.num_generation_tokens > 0 for m in workers.metrics()) == 2
    assert all(by_version[-1].num_tokens for by_version in workers.acceptance())


@pytest.mark.slow
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


@pytest.mark.slow
def test_scores_are_those_of_one_engine(workers, single, ragged_prompts):
    rollouts = single.generate(ragged_prompts(5, 3, 6), PARAMS)
    pairs = [(one.prompt_token_ids, one.token_ids) for one in rollouts]
    for samples, params in (rollouts, None), (pairs, SamplingParams(temperature=0.5)):
        found = workers.score(samples, params, features=True)
        for one, other in zip(found, single.score(samples, params, features=True), strict=True):
            np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-4)
            np.testing.assert_allclose(one.hidden, other.hidden, atol=1e-4)


@pytest.mark.slow
def test_bad_samples_are_told_of_as_by_one_engine(workers, single):
    before = [one.num_prompt_tokens for one in workers.metrics()]
    samples = [([1, 2], [3])] * 5 + [([1, 2], [1000])]
    for engine in workers, single:
        with pytest.raises(ValueError, match="^sample 5: its output: token id 1000 is outside"):
            engine.score(samples)
        with pytest.raises(ValueError, match="sampling_params=3 must be a SamplingParams"):
            engine.score(samples, 3)
    assert [one.num_prompt_tokens for one in workers.metrics()] == before


def scaled(weights, factor, dtype="float32"):
    return jax.tree.map(lambda x: (x * factor).astype(dtype), weights)


@pytest.mark.slow
def test_weights_reach_all_workers_and_those_that_replace_them(
    ray, workers, single, original, ragged_prompts
):
    weights = scaled(original, 1.2)
    single.update_weights(weights)
    update = workers.update_weights(weights)
    assert update.version == workers.version == single.version
    assert workers.checksums() == [single.checksum()] * 2
    workers.update_drafter(single.params.drafter)
    ray.kill(workers._workers[1])
    assert workers.checksums() == [single.checksum()] * 2
    prompts = ragged_prompts(5, 6, 7, 8)
    assert_same(workers.generate(prompts, PARAMS), single.generate(prompts, PARAMS))
    with pytest.raises(ValueError, match="is not above"):
        workers.update_weights(weights, single.version)
    with pytest.raises(ValueError, match="missing"):
        workers.update_weights({"lm_head": weights.lm_head})
    assert workers.version == single.version
    with pytest.raises(ValueError, match="drafter's weights do not fit"):
        workers.update_weights(original, drafter={"fc.weight": np.zeros((2, 2), np.float32)})
    assert workers.checksums() == [single.checksum()] * 2
    assert workers.version == single.version
    half = scaled(original, 1.0, "bfloat16")
    single.update_weights(half)
    workers.update_weights(half)
    assert workers.checksums() == [single.checksum()] * 2


@pytest.mark.slow
def test_an_update_that_fails_on_one_worker_is_taken_back_on_all(ray, workers, single, original):
    def break_updates(worker):
        def update_weights(*_, **__):
            raise MemoryError("no room for weights")

        worker.engine.update_weights = update_weights

    ray.get(workers._workers[1].__ray_call__.remote(break_updates))
    weights = scaled(original, 1.5)
    with pytest.raises(MemoryError, match="no room"):
        workers.update_weights(weights)
    assert workers.version == single.version
    assert workers.checksums() == [single.checksum()] * 2
    single.update_weights(weights)
    assert workers.update_weights(weights).version == single.version
    assert workers.checksums() == [single.checksum()] * 2


@pytest.mark.slow
def test_what_dead_workers_had_is_done_by_others(ray, workers, single, ragged_prompts):
    prompts = ragged_prompts(*range(3, 15))
    params = [replace(PARAMS, n=2, max_tokens=30)] * len(prompts)
    expected = single.generate(prompts, params)
    found = []
    for rollout in workers.stream(prompts, params):
        if not found:  # one of them is in the middle of its work, the other about to begin
            for worker in list(workers._workers):
                ray.kill(worker)
        found.append(rollout)
    keys = [(one.prompt_index, one.sample_index) for one in found]
    assert len(set(keys)) == len(keys) == len(expected)
    assert_same(sorted(found, key=lambda one: (one.prompt_index, one.sample_index)), expected)


@pytest.mark.slow
def test_a_deadly_prompt_is_named_and_nothing_is_lost(workers, single, ragged_prompts):
    prompts = ragged_prompts(3, 4, 5, 6, 7)
    params = [PARAMS] * 5
    expected = single.generate(prompts, params)

    def poison(tokens, length, logits):  # dies when it runs, not when it is traced
        shape = jax.ShapeDtypeStruct(logits.shape, logits.dtype)
        return jax.pure_callback(lambda _: os._exit(1), shape, logits, vmap_method="sequential")

    params[2] = replace(PARAMS, logits_processors=(poison,))
    with pytest.raises(
        WorkersDied, match="3 workers died one after the other at prompt 2"
    ) as raised:
        workers.generate(prompts, params)
    places = [one.prompt_index for one in raised.value.rollouts]
    assert {0, 1} <= set(places) and 2 not in places and len(set(places)) == len(places)
    assert_same(raised.value.rollouts, [expected[place] for place in places])
    workers._num_prompts = 0
    assert_same(workers.generate(prompts, PARAMS), expected)  # they live on


@pytest.mark.slow
def test_a_bad_prompt_is_told_of_as_by_one_engine(workers):
    with pytest.raises(ValueError, match="prompt 2: token id 1000 is outside the vocabulary"):
        workers.generate([[1], [2], [1000]], PARAMS)
    with pytest.raises(ValueError, match="has 2 entries for 1 prompts"):
        workers.generate([[1]], [PARAMS] * 2)
    assert len(workers.generate([[1], [2]], PARAMS)) == 2


@pytest.mark.slow
def test_leaving_a_stream_ends_what_runs(workers, ragged_prompts):
    for _ in workers.stream(ragged_prompts(3, 4, 5, 6, 7, 8, 9, 10), PARAMS):
        break
    assert all(m.num_requests_running == 0 for m in workers.metrics())
    assert len(workers.generate([[1, 2]], PARAMS)[0].token_ids) == 20


@pytest.mark.slow
def test_leaving_a_stream_leaves_the_others(workers, single, ragged_prompts):
    prompts = ragged_prompts(3, 4, 5, 6, 7, 8)
    params = [replace(PARAMS, max_tokens=n) for n in (1, 1, 50, 50, 9, 9)]
    expected = single.generate(prompts, params)
    kept = workers.stream(prompts, params)
    found = [next(kept)]  # the second worker is busy with the long ones of both
    for _ in workers.stream(prompts, params):
        break
    found += kept
    assert_same(sorted(found, key=lambda one: one.prompt_index), expected)


@pytest.mark.slow
def test_a_stream_ends_when_the_workers_sleep(workers, ragged_prompts):
    prompts = ragged_prompts(3, 4, 5, 6, 7, 8, 9, 10)
    found = []
    with pytest.raises(RuntimeError, match="asleep; call wake_up"):
        for rollout in workers.stream(prompts, PARAMS):
            found.append(rollout)
            workers.sleep()
    assert 0 < len(found) < len(prompts)
    workers.wake_up()
    assert all(m.num_requests_running == 0 for m in workers.metrics())
    found = []
    for rollout in workers.stream(prompts, PARAMS):
        found.append(rollout.prompt_index)
        workers.sleep()
        workers.wake_up()
    assert sorted(found) == list(range(len(prompts)))


@pytest.mark.slow
def test_workers_sleep_and_wake(ray, workers):
    before = workers.checksums()
    workers.sleep(2)
    ray.kill(workers._workers[0])
    with pytest.raises(RuntimeError, match="asleep; call wake_up"):
        workers.generate([[1]], PARAMS)
    workers.wake_up()
    assert workers.checksums() == before
    assert len(workers.generate([[1], [2], [3]], PARAMS)) == 3


@pytest.mark.slow
def test_bad_input_is_refused_at_construction(ray, folder, monkeypatch):
    with pytest.raises(ValueError, match="num_workers=0 must be an integer of at least 1"):
        RayRollouts(folder, num_workers=0)
    with pytest.raises(ValueError, match="group_size=0"):
        RayRollouts(folder, num_workers=1, group_size=0)
    with pytest.raises(ValueError, match="model=int must be a folder or hub id"):
        RayRollouts(3, num_workers=1)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="max_num_seqs=0"):
        RayRollouts(folder, num_workers=1, ray_options={"num_cpus": 0}, max_num_seqs=0)
    with pytest.raises(
        ValueError,
        match=r"num_workers=8 of \{'CPU': 1\} each do not fit .* has \{'CPU': 2.0\} on 1 node",
    ):
        RayRollouts(folder, num_workers=8)
    with pytest.raises(ValueError, match="'GPU': 1"):
        RayRollouts(folder, num_workers=1, ray_options={"num_gpus": 1})
    with pytest.raises(ValueError, match="'rack': 2"):
        RayRollouts(folder, num_workers=1, ray_options={"resources": {"rack": 2}})
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ImportError, match=r"pip install 'specjax\[ray\]'"):
        RayRollouts(folder, num_workers=1)


@pytest.mark.slow
def test_a_closed_one_says_so(ray, folder):
    made = RayRollouts(folder, num_workers=1, ray_options={"num_cpus": 0}, **OPTIONS)
    made.close()
    made.close()
    with pytest.raises(RuntimeError, match="is closed"):
        made.generate([[1]])
    assert ray_workers.MAX_DEATHS == 3


class Reference:
    """What an actor gave, or raised."""

    def __init__(self, value=None, error=None):
        self.value, self.error = value, error


class OneThread:
    """As much of Ray as workers need. Actors do what they are told before they are asked."""

    class exceptions:  # noqa: N801
        class RayActorError(Exception):
            pass

        class WorkerCrashedError(Exception):
            pass

        class ObjectLostError(Exception):
            pass

        class RayTaskError(Exception):
            pass

    def __init__(self):
        self.cpus = 4.0
        self.actors = []  # whether each that was ever started is alive

    def is_initialized(self):
        return True

    def nodes(self):
        return [{"Alive": True, "Resources": {"CPU": self.cpus}}, {"Alive": False, "Resources": {}}]

    def remote(self, **_):
        return lambda cls: SimpleNamespace(options=lambda **_: Actors(self, cls))

    def put(self, value):
        return Reference(value)

    def get(self, reference):
        if reference.error is not None:
            raise reference.error
        return reference.value

    def wait(self, references, num_returns):
        return references[:num_returns], references[num_returns:]

    def kill(self, actor):
        actor.is_alive = False


class Actors:
    def __init__(self, ray, cls):
        self.ray, self.cls = ray, cls

    def remote(self, *args):
        actor = Actor(self.cls(*resolved(args)))
        self.ray.actors.append(actor)
        return actor


def resolved(args):
    return [one.value if isinstance(one, Reference) else one for one in args]


class Actor:
    def __init__(self, instance):
        self.instance, self.is_alive = instance, True

    def __getattr__(self, name):
        def remote(*args, **kwargs):
            kwargs = dict(zip(kwargs, resolved(kwargs.values()), strict=True))
            if not self.is_alive:
                return Reference(error=OneThread.exceptions.RayActorError("it was killed"))
            try:
                return Reference(getattr(self.instance, name)(*resolved(args), **kwargs))
            except Death:
                self.is_alive = False
                return Reference(error=OneThread.exceptions.RayActorError("it died"))
            except Exception as error:
                failed = OneThread.exceptions.RayTaskError()
                failed.cause = error
                return Reference(error=failed)

        method = SimpleNamespace(remote=remote)
        method.options = lambda concurrency_group: method
        return method


class Death(BaseException):
    """Of the process."""


class FailingEngine:
    """Knows no more than its versions, and fails as planned."""

    plan = defaultdict(list)  # for each method what its next calls raise, or None

    def __init__(self, model, speculative_config=None):
        self.version = self.drafter_version = self.sleep_level = 0
        self.weights = self.drafter = None
        self.aborted = []
        self._fail("build")

    def _fail(self, method):
        if self.plan[method] and (error := self.plan[method].pop(0)):
            raise error

    def update_weights(self, weights, version, *, pause="keep", drafter=None):
        self._fail("update_weights")
        if "mtp.fc" in weights and drafter is None:
            drafter = weights
        if drafter is not None:
            self.update_drafter(drafter)
        self.weights, self.version = weights["w"].item(), version
        return WeightUpdate(version, 1, 4, 0.0)

    def update_drafter(self, weights, *, pause="keep"):
        self._fail("update_drafter")
        self.drafter = weights["mtp.fc"].item()
        self.drafter_version += 1
        return WeightUpdate(self.drafter_version, 1, 4, 0.0)

    def facts(self):
        return self.version, self.drafter_version, self.weights, self.drafter, self.sleep_level

    def metrics(self):
        return 0

    def check(self, prompts, sampling_params):
        pass

    def generate(self, prompts, sampling_params=None, *, label):
        self._fail("generate")
        assert not self.sleep_level
        empty = np.zeros(0, np.int32)
        return RolloutBatch(
            Rollout(empty, empty, empty, None, (), "length", None, PARAMS, 0, i, 0)
            for i in range(len(prompts))
        )

    def check_score(self, samples, sampling_params, features):
        pass

    def score(self, samples, sampling_params, features):
        self._fail("score")
        return [output for _, output in samples]

    def abort(self, label):
        self.aborted.append(label)

    def sleep(self, level):
        self._fail("sleep")
        self.sleep_level = level

    def wake_up(self):
        self._fail("wake_up")
        self.sleep_level = 0


@pytest.fixture
def one_thread(monkeypatch):
    made = OneThread()
    monkeypatch.setattr(ray_workers, "_import_ray", lambda: made)
    monkeypatch.setattr(ray_workers, "RolloutEngine", FailingEngine)
    monkeypatch.setattr(FailingEngine, "plan", defaultdict(list))
    return made


@pytest.fixture
def failing(one_thread):
    with RayRollouts("folder", num_workers=2, group_size=1) as made:
        yield made


def facts_of(workers):
    """What all workers have, and every one that replaces them would have."""
    found = workers._everywhere("call", "facts")
    for worker in workers._workers:
        workers._ray.kill(worker)
    assert workers._everywhere("call", "facts") == found
    assert found == [found[0]] * len(found)
    return found[0]


def weights_of(value, drafter=None):
    own = {} if drafter is None else {"mtp.fc": np.full(1, drafter)}
    return {"w": np.full(1, value)} | own


@pytest.mark.parametrize(
    "plan, raised",
    [
        ([None, MemoryError("full")], MemoryError),
        ([MemoryError("full"), None], MemoryError),
        ([ValueError("bad"), None], ValueError),
        ([None, *[Death(), None] * 2, Death()], WorkersDied),  # two are built anew
        ([ValueError("bad"), ValueError("bad")], ValueError),
    ],
)
def test_workers_are_updated_all_or_none(failing, plan, raised):
    failing.update_weights(weights_of(1), 3)
    before = list(failing._workers)
    FailingEngine.plan["update_weights"] = list(plan)
    with pytest.raises(raised):
        failing.update_weights(weights_of(2))
    refused = all(isinstance(error, ValueError) for error in plan)
    assert all(worker.is_alive for worker in before) == refused
    assert failing.version == 3
    assert facts_of(failing) == (3, 0, 1, None, 0)
    assert failing.update_weights(weights_of(2)).version == 4
    assert facts_of(failing) == (4, 0, 2, None, 0)


def test_a_worker_that_dies_at_an_update_is_replaced_by_one_that_takes_it(failing):
    FailingEngine.plan["update_weights"] = [None, Death(), Death()]
    failing.update_weights(weights_of(1), 3)
    assert facts_of(failing) == (3, 0, 1, None, 0)


def test_target_and_drafter_are_updated_at_once(failing):
    failing.update_weights(weights_of(1), drafter=weights_of(0, 5))
    FailingEngine.plan["update_drafter"] = [ValueError("bad"), ValueError("bad")]
    with pytest.raises(ValueError, match="bad"):
        failing.update_weights(weights_of(2), drafter=weights_of(0, 6))
    assert facts_of(failing) == (1, 1, 1, 5, 0)


def test_the_newest_drafter_counts_however_it_came(failing):
    failing.update_drafter(weights_of(0, 5))
    assert facts_of(failing) == (0, 1, None, 5, 0)
    failing.update_weights(weights_of(1, 6))
    assert facts_of(failing) == (1, 2, 1, 6, 0)
    failing.update_weights(weights_of(2))
    assert facts_of(failing) == (2, 2, 2, 6, 0)
    failing.update_drafter(weights_of(0, 7))
    assert facts_of(failing) == (2, 3, 2, 7, 0)
    failing.update_weights(weights_of(3, 8), drafter=weights_of(0, 9))
    assert facts_of(failing) == (3, 4, 3, 9, 0)


def test_workers_are_asleep_until_all_are_awake(failing):
    FailingEngine.plan["sleep"] = [ValueError("bad"), ValueError("bad")]
    with pytest.raises(ValueError):
        failing.sleep(3)
    assert len(failing.generate([[1]])) == 1
    FailingEngine.plan["sleep"] = [None, MemoryError()]
    with pytest.raises(MemoryError):
        failing.sleep()
    with pytest.raises(RuntimeError, match="asleep"):
        failing.generate([[1]])
    failing.sleep()
    assert facts_of(failing)[-1] == 1
    FailingEngine.plan["wake_up"] = [None, MemoryError()]
    with pytest.raises(MemoryError):
        failing.wake_up()
    with pytest.raises(RuntimeError, match="asleep"):
        failing.score([([1], [1])])
    failing.wake_up()
    assert facts_of(failing)[-1] == 0
    assert len(failing.generate([[1], [2], [3]])) == 3


def test_a_stream_goes_on_only_while_workers_are_awake_and_there(failing):
    for rollout in (stream := failing.stream([[1]] * 5)):
        failing.sleep()
        failing.wake_up()
        if rollout.prompt_index == 3:
            break
    failing.sleep()
    with pytest.raises(RuntimeError, match="asleep"):
        next(stream)
    failing.wake_up()
    stream = failing.stream([[1]] * 5)
    next(stream)
    failing.close()
    with pytest.raises(RuntimeError, match="is closed"):
        next(stream)


def test_a_worker_that_could_not_be_built_is_built_again(failing):
    failing._ray.kill(failing._workers[1])
    FailingEngine.plan["build"] = [MemoryError("full")]
    with pytest.raises(MemoryError, match="full"):
        failing.metrics()
    assert failing.metrics() == [0, 0]
    FailingEngine.plan["build"] = [MemoryError("full")]
    FailingEngine.plan["generate"] = [None, Death()]
    with pytest.raises(RolloutError, match="could not be built again: full") as raised:
        failing.generate([[1]] * 4)
    assert [one.prompt_index for one in raised.value.rollouts] == [0, 2]
    assert len(failing.generate([[1]] * 4)) == 4


def test_a_deadly_sample_is_named_and_others_are_scored_in_order(failing):
    samples = [([1], [i]) for i in range(5)]
    FailingEngine.plan["score"] = [Death(), Death(), None, Death()]
    assert failing.score(samples) == [[0], [1], [2], [3], [4]]
    FailingEngine.plan["score"] = [Death(), None, Death(), None, Death()]
    with pytest.raises(WorkersDied, match="3 workers died one after the other at sample 0"):
        failing.score(samples)
    assert failing.score([]) == []


def test_workers_that_cannot_be_replaced_are_not_waited_for(failing, one_thread):
    FailingEngine.plan["generate"] = [None, Death()]
    one_thread.cpus = 1.0
    with pytest.raises(WorkersDied, match="cannot be replaced: num_workers=2 .* for 1;") as raised:
        failing.generate([[1]] * 4)
    assert [one.prompt_index for one in raised.value.rollouts] == [0]
    one_thread.cpus = 2.0
    assert len(failing.generate([[1]] * 4)) == 4


def test_workers_that_do_not_fit_are_refused(one_thread):
    with pytest.raises(ValueError, match=r"'CPU': 1, 'GPU': 0.5\} each .* on 1 node\(s\).* for 0;"):
        RayRollouts("folder", num_workers=2, ray_options={"num_gpus": 0.5})
    assert not one_thread.actors


def worker_of(monkeypatch):
    monkeypatch.setattr(ray_workers, "RolloutEngine", FailingEngine)
    return ray_workers._Worker("folder", {}, ray_workers._State(), None, None)


def test_a_call_that_was_aborted_before_it_began_generates_nothing(monkeypatch):
    worker = worker_of(monkeypatch)
    worker.abort(3)
    assert worker.generate(3, [[1]]) is None
    assert len(worker.generate(4, [[1]])) == 1


def test_an_abort_reaches_a_call_on_its_way_to_the_engine(monkeypatch):
    worker = worker_of(monkeypatch)
    begun, ended = threading.Event(), threading.Event()

    def generate(*_, label):
        begun.set()
        ended.wait()

    def abort(label):
        worker.engine.aborted.append(label)
        if len(worker.engine.aborted) == 2:  # the first came too early
            ended.set()

    worker.engine.generate, worker.engine.abort = generate, abort
    thread = threading.Thread(target=worker.generate, args=(3, [[1]]))
    thread.start()
    begun.wait()
    worker.abort(4)
    worker.abort(3)
    thread.join()
    assert worker.engine.aborted == [3, 3]
