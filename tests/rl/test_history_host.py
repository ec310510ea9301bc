"""A history without an engine: what it keeps, what it refuses, and its use by several threads."""

import json
import random
import re
import sys
import threading

import numpy as np
import pytest
from support.rollouts import made_rollout

from specjax.host.drafts.text_index import SuffixLimits, TextIndex
from specjax.rl import RolloutHistory

IDENTITY = {"vocabulary": 50, "model": "m", "tokenizer": "t"}


def made(prompt, output, **fields):
    return made_rollout(prompt, output, np.zeros(len(output)), **fields)


def filled(num_prompts=2, num_updates=2, **options):
    """Return a history with two rollouts of each prompt in each update."""
    history = RolloutHistory(**options)
    history.bind(IDENTITY)
    for update in range(num_updates):
        history.begin_update(update)
        for i in range(2 * num_prompts):
            output = [update, i % 2, *range(7)]
            history.add(made([i // 2] * 5, output, seed=2**31 + i, sample_index=i % 2))
    return history


def identity_of(**fields):
    return np.frombuffer(json.dumps(IDENTITY | {"update": 2} | fields).encode(), np.uint8)


DAMAGED = {
    "prompts": np.full(8, 2**63, np.uint64),
    "updates": np.full(8, 3),
    "samples": np.full(8, -1),
    "seeds": np.full(8, 2**64 - 1, np.uint64),
    "tail_lengths": np.full(8, 25),
    "lengths": np.full(8, 2**31),
}


@pytest.mark.parametrize(
    "bad",
    [
        *({name: array} for name, array in DAMAGED.items()),
        {"seeds": np.full(8, 2**32)},
        {"seeds": np.full(8, -5)},
        {"tokens": np.full(112, 2**40), "identity": identity_of(vocabulary=None)},
        {"update": 10**30, "identity": identity_of(update=10**30)},
        {"update": -1, "identity": identity_of(update=-1)},
        {"identity": np.frombuffer(b"[" * 100_000, np.uint8)},
        {"identity": np.frombuffer(b"[1]", np.uint8)},
        {"identity": 10**12},
    ],
    ids=lambda bad: "-".join(bad),
)
def test_a_damaged_state_is_refused(bad, tmp_path):
    state = filled().state() | {"identity": identity_of()}
    assert len(RolloutHistory.of(state)) == 8
    state |= {name: bad[name] for name in bad if name in state}
    with pytest.raises(ValueError, match=f"not the state of a RolloutHistory: {[*bad][0]}"):
        RolloutHistory.of(state)
    with open(tmp_path / "damaged", "wb") as file:
        for array in state.values():
            np.save(file, array)
    with pytest.raises(ValueError, match=f"damaged has no whole rollout: {[*bad][0]}"):
        RolloutHistory.load(tmp_path / "damaged")


def test_bad_arguments():
    history = filled()
    for bad in None, 5, b"x", "a\0b", "~no-such-user/x":
        for use in history.save, RolloutHistory.load:
            with pytest.raises(ValueError, match=f"^path={re.escape(repr(bad))}.* name "):
                use(bad)
    with pytest.raises(ValueError, match="not the state.*: it is a ndarray, not a mapping"):
        RolloutHistory.of(np.zeros(3))
    with pytest.raises(ValueError, match="^rollout=5 must be a Rollout"):
        history.add(5)


def test_a_file_in_the_home_directory(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    filled().save("~/history")
    assert (tmp_path / "history").is_file() and len(RolloutHistory.load("~/history")) == 8


def test_one_prompt_has_at_most_the_maximum_of_tokens():
    """Its oldest rollouts are forgotten, but the latest is kept, whatever its length."""
    history = RolloutHistory(max_tokens=100)
    for i in range(20):
        history.add(made([1] * 5, [i] * 9, seed=i))
        assert history.num_tokens <= 100
    assert history.state()["seeds"].tolist() == [*range(14, 20)]  # of 15 tokens each
    history.add(made([1] * 5, [20] * 200, seed=20))
    assert history.state()["seeds"].tolist() == [20] and history.num_tokens == 206


def test_an_update_that_leaves_the_window_is_forgotten_at_once(monkeypatch):
    """Forgetting one rollout at a time would move all other tokens each time."""
    counts, forget = [], TextIndex.forget
    monkeypatch.setattr(TextIndex, "forget", lambda *args: counts.append(args[1]) or forget(*args))
    history = RolloutHistory(window=1)
    for update in range(4):
        history.begin_update(update)
        for i in range(10):
            history.add(made([1] * 5, [update, i]))
    assert history.state()["updates"].tolist() == [3] * 10 + [4] * 10
    assert [count for count in counts if count] == [80, 80] and len(counts) == 40


def test_only_accepted_calls_bind_a_history():
    """A history without rollouts is open to all engines, also after it was loaded."""
    history, other = RolloutHistory(), IDENTITY | {"model": "another"}
    history.check(IDENTITY)
    history.check(other)
    history.bind(IDENTITY)
    history = RolloutHistory.of(history.state())
    history.check(other)
    history.add(made([1], [2]))
    with pytest.raises(ValueError, match="rollouts of another model"):
        history.check(other)


def test_threads_share_a_history():
    """A thread adds rollouts and forgets old ones, while another searches, saves and counts."""
    history, rng = filled(200, window=1, max_tokens=10_000), random.Random(0)
    text, is_done = [rng.randrange(20) for _ in range(100)], threading.Event()

    def write():
        for update in range(1_000_000):
            history.begin_update(update)
            for i in range(20):
                history.add(made([7] * 3, text))
                history.add(made([update, i], [1]))
            if is_done.is_set():
                return

    history.add(made([7] * 3, text))
    index = history._prompt([7] * 3).index
    usual, thread = sys.getswitchinterval(), threading.Thread(target=write)
    sys.setswitchinterval(1e-6)
    try:
        thread.start()
        for i in range(300):
            index.continuation(text[: 30 + i % 60], 8, 4, SuffixLimits())
            assert len(history) and (i % 10 or len(history.state()["tokens"]))
    finally:
        is_done.set()
        thread.join()
        sys.setswitchinterval(usual)
