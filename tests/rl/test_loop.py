"""Events between steps, from any thread: pauses, aborts, updates, sleep and failures."""

import time
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from dataclasses import replace

import pytest
from support.rollouts import PROMPTS, SAMPLED, lasting, noisy

from specjax import SamplingParams
from specjax.rl.rollouts import RolloutError

pytestmark = pytest.mark.usefixtures("simulated_device")

LONG = SamplingParams(temperature=1.0, max_tokens=40, ignore_eos=True)


@pytest.fixture
def beside():
    """Return a function that runs a function in another thread, and returns a future."""
    pool = ThreadPoolExecutor(4)
    yield pool.submit
    pool.shutdown(wait=False)  # a thread that hangs has failed its test already


@pytest.fixture
def unhurried(engine, monkeypatch):
    """Make steps take as long as on a device, so that other threads run between them."""
    step = engine._engine.step

    def slow():
        time.sleep(0.005)
        return step()

    monkeypatch.setattr(engine._engine, "step", slow)


def read(stream, into, message):
    """Append a stream's rollouts to `into`, until it fails with `message`."""
    with pytest.raises(RolloutError, match=message):
        for one in stream:
            into.append(one)


@pytest.mark.slow
@pytest.mark.parametrize("pause", ["abort", "wait", "keep"])
def test_an_update_by_another_thread(engine, original, unhurried, beside, pause):
    """A trainer's thread updates weights again and again, while another thread generates."""
    first, updates = engine.version, 0
    running = beside(lambda: [engine.generate([*PROMPTS, *PROMPTS], LONG) for _ in range(3)])
    while not running.done():
        engine.update_weights(noisy(original, updates), pause=pause)
        updates += 1
        wait_for([running], 0.01)
    assert updates > 1
    for one in (one for batch in running.result() for one in batch):
        assert sum(span.num_tokens for span in one.versions) == len(one.token_ids)
        versions = [span.version for span in one.versions]
        assert versions == sorted(versions) and all(first <= v <= engine.version for v in versions)
        assert len(one.token_ids) == 40 or (pause == "abort" and one.is_partial)
        assert pause == "keep" or len(versions) <= 1


def test_updates_of_many_threads(engine, hf, beside):
    """Each thread sees whole weights, whatever other threads do."""
    weights, first = {name: x.numpy() for name, x in hf.state_dict().items()}, engine.version

    def update():
        for _ in range(5):
            engine.update_weights(weights)
            assert engine.params.target is not None

    for thread in [beside(update) for _ in range(3)]:
        thread.result()
    assert engine.version == first + 15


def test_paused_and_resumed_by_another_thread(engine, beside):
    engine.pause()
    running = beside(engine.generate, PROMPTS, SAMPLED)
    wait_for([running], 0.3)
    assert not running.done() and engine.metrics().num_requests_running == 0
    engine.resume()
    assert len(running.result()) == 2 * len(PROMPTS)


def test_generating_while_paused_by_oneself_loses_nothing(engine):
    """No thread could resume the engine, so the call raises an error with its rollouts so far."""
    stream = engine.stream(PROMPTS, lasting(2, 40, 40, 40))
    rollouts = [next(stream)]
    engine.pause()
    read(stream, rollouts, "resume")
    assert len(rollouts) == 4 and sum(one.is_partial for one in rollouts) == 3
    engine.resume()
    assert all(not one.is_partial for one in engine.generate([r for r in rollouts if r.is_partial]))
    engine.pause()
    with pytest.raises(RolloutError) as caught:
        engine.generate(PROMPTS, SAMPLED)
    assert len(caught.value.rollouts) == 2 * len(PROMPTS)
    with pytest.raises(ValueError, match="paused already"):
        engine.update_weights(engine.params.target, pause="wait")


def test_a_device_that_fails_loses_nothing_and_every_caller_hears_of_it(
    engine, monkeypatch, beside
):
    """The error reaches all callers with unfinished rollouts, and no other caller."""

    def fail(*_):
        raise RuntimeError("out of memory")

    lengths = lasting(2, 40, 40, 40)
    done = engine.stream([PROMPTS[0]], lasting(2))
    mine, other = engine.stream(PROMPTS[:2], lengths[:2]), engine.stream(PROMPTS[2:], lengths[2:])
    rollouts, last = [next(mine)], next(done)
    with monkeypatch.context() as patch:
        patch.setattr(engine._engine, "_launch", fail)
        others = [beside(next, other).result()]
    read(mine, rollouts, "out of memory")
    read(other, others, "out of memory")
    assert len(rollouts) == 2 and len(others) == 2
    assert list(done) == [] and not last.is_partial
    partial = [one for one in [*rollouts, *others] if one.is_partial]
    assert [len(one.token_ids) for one in engine.generate(partial)] == [40] * 3


@pytest.mark.parametrize("how", ["pause and abort", "sleep and abort", "update"])
def test_an_abort_wakes_whoever_waits(engine, original, unhurried, beside, how):
    running = beside(engine.generate, PROMPTS, replace(LONG, n=4))
    while not engine.metrics().num_requests_running:
        time.sleep(0.001)
    if how == "sleep and abort":
        engine.sleep()
    else:
        engine.pause()
    if how == "update":
        engine.update_weights(original, pause="abort")
    else:
        engine.abort()
    batch = running.result(30)
    assert len(batch) == 16 and any(one.is_partial for one in batch)


def test_labels_say_which_calls_end(engine):
    params = lasting(2, 40)
    mine = engine.stream(PROMPTS[:2], params, label="mine")
    other = engine.stream(PROMPTS[:2], params, label=("other", 1))
    rollouts, others = [next(mine)], [next(other)]
    engine.abort("mine")
    engine.abort("nobody's")
    assert [one.is_partial for one in [*rollouts, *mine]] == [False, True]
    assert [one.is_partial for one in [*others, *other]] == [False, False]


def test_waking_up_is_not_going_on_after_a_pause(engine):
    engine.pause()
    engine.sleep()
    for _ in range(2):
        engine.wake_up()
        with pytest.raises(RolloutError, match="resume"):
            engine.generate(PROMPTS, SAMPLED)
    engine.resume()
    assert len(engine.generate(PROMPTS, SAMPLED)) == 2 * len(PROMPTS)


def test_a_stream_that_is_thrown_away_in_a_step(engine, monkeypatch):
    """The garbage collector may do this in the thread that holds the lock."""
    streams = [engine.stream(PROMPTS, lasting(1, 40, 40, 40))]
    next(streams[0])
    step = engine._engine.step

    def collect():
        streams.clear()
        return step()

    monkeypatch.setattr(engine._engine, "step", collect)
    batch = engine.generate(PROMPTS, SAMPLED)
    assert len(batch) == 2 * len(PROMPTS) and not any(one.is_partial for one in batch)
    assert not engine._engine.has_work


def test_closed(build):
    engine = build()
    stream = engine.stream([[1]], LONG)
    engine.close()
    engine.close()
    for call in (
        lambda: engine.generate([[1]]),
        lambda: next(stream),
        lambda: engine.score([([1], [2])]),
        lambda: engine.sleep(),
        lambda: engine.abort(),
        engine.resume,
        engine.checksum,
        lambda: engine.params,
        lambda: engine.update_weights({}),
    ):
        with pytest.raises(RuntimeError, match="closed"):
            call()
