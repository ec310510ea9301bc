"""Failures of workers, with a one-threaded fake of Ray whose engines fail on demand."""

import sys
import threading
from collections import defaultdict

import numpy as np
import pytest
from support.one_thread_ray import Death, FailingEngine, OneThread

from specjax.rl import ray_worker, ray_workers
from specjax.rl.ray_pool import WorkersDied
from specjax.rl.ray_workers import RayRollouts
from specjax.rl.rollouts import RolloutError


@pytest.fixture
def one_thread(monkeypatch):
    made = OneThread()
    monkeypatch.setattr(ray_workers, "import_ray", lambda name: made)
    monkeypatch.setattr(ray_worker, "RolloutEngine", FailingEngine)
    monkeypatch.setattr(FailingEngine, "plan", defaultdict(list))
    return made


@pytest.fixture
def failing(one_thread):
    with RayRollouts("folder", num_workers=2, group_size=1) as made:
        yield made


@pytest.mark.parametrize(
    "options, message",
    [
        ({"num_workers": 0}, "num_workers=0 must be an integer of at least 1"),
        ({"group_size": 0}, "group_size=0"),
        ({"model": 3}, "model=int must be a folder or hub id"),
        (
            {"num_workers": 2, "ray_options": {"num_gpus": 0.5}},
            r"'CPU': 1, 'GPU': 0.5\} each .* on 1 node\(s\).* for 0;",
        ),
        ({"num_workers": 2, "ray_options": {"resources": {"rack": 2}}}, "'rack': 2"),
    ],
)
def test_bad_input_is_refused_before_anything_starts(one_thread, options, message):
    with pytest.raises(ValueError, match=message):
        RayRollouts(**{"model": "folder", "num_workers": 1} | options)
    assert not one_thread.actors


def test_without_ray_its_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ImportError, match=r"pip install 'specjax\[ray\]'"):
        RayRollouts("folder", num_workers=1)


def test_a_closed_one_says_so(failing):
    failing.close()
    failing.close()
    with pytest.raises(RuntimeError, match="is closed"):
        failing.generate([[1]])


def facts_of(workers):
    """Return the state of all workers. New workers must have the same state."""
    found = workers._pool.call_all("facts")
    for worker in workers._pool.workers:
        workers._pool._ray.kill(worker)
    assert workers._pool.call_all("facts") == found
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
    before = list(failing._pool.workers)
    FailingEngine.plan["update_weights"] = list(plan)
    failing._pool._ray.kills_late = True
    with pytest.raises(raised):
        failing.update_weights(weights_of(2))
    failing._pool._ray.kills_late = False
    refused = all(isinstance(error, ValueError) for error in plan)
    assert (failing._pool.workers == before) == refused
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
    failing._pool._ray.kill(failing._pool.workers[1])
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
    FailingEngine.plan["generate"] = [None, Death(), None, Death(), None, Death()]
    with pytest.raises(WorkersDied, match="one after the other at prompt 1") as raised:
        failing.generate([[1]] * 4)
    assert [one.prompt_index for one in raised.value.rollouts] == [0, 2, 3]
    assert len(failing.generate([[1]] * 4)) == 4


def test_workers_that_cannot_be_replaced_are_not_waited_for(failing, one_thread):
    FailingEngine.plan["generate"] = [None, Death()]
    one_thread.cpus = 1.0
    with pytest.raises(WorkersDied, match="cannot be replaced: num_workers=2 .* for 1;") as raised:
        failing.generate([[1]] * 4)
    assert [one.prompt_index for one in raised.value.rollouts] == [0]
    one_thread.cpus = 2.0
    assert len(failing.generate([[1]] * 4)) == 4


@pytest.fixture
def worker(one_thread):
    return ray_worker.Worker("folder", {}, ray_worker.WorkerState(), None, None)


def test_a_call_that_was_aborted_before_it_began_generates_nothing(worker):
    worker.abort(3)
    assert worker.generate(3, [[1]]) is None
    assert len(worker.generate(4, [[1]])) == 1


def test_an_abort_reaches_a_call_on_its_way_to_the_engine(worker):
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
