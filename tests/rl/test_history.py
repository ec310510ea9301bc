"""Rollouts drafted from earlier rollouts are what they would be without."""

import io
import re

import numpy as np
import orbax.checkpoint as ocp
import pytest
from support.engines import SIZES, VOCAB, K, random_prompts, simulated_engines
from support.rollouts import copied, noisy

from specjax import SamplingParams
from specjax.rl import RolloutEngine, RolloutHistory

CONFIG = {"method": "suffix", "num_speculative_tokens": K}
PROMPTS = random_prompts(9, 20, 5, vocab_size=VOCAB)


def outputs_of(batch):
    return [(one.prompt_index, one.sample_index, one.token_ids.tolist()) for one in batch]


def generate(engine, history=None, prompts=PROMPTS, **params):
    params = {"n": 3, "temperature": 1.0, "max_tokens": 24, "ignore_eos": True, **params}
    return engine.generate(prompts, SamplingParams(**params), history=history)


@pytest.fixture(scope="module")
def engine(target):
    with (
        simulated_engines(),
        RolloutEngine(target.folder, speculative_config=CONFIG, **SIZES) as engine,
    ):
        yield engine


def test_ten_updates_with_and_without_a_history(target):
    """On a real device, with weights that change a little."""
    history = RolloutHistory(window=2)
    with RolloutEngine(target.folder, speculative_config=CONFIG, **SIZES) as engine:
        weights, accepted = copied(engine.params.target), [0]
        for update in range(10):
            rollouts = [
                outputs_of(generate(engine, one, temperature=0.05, seed=update))
                for one in (None, history)
            ]
            assert rollouts[0] == rollouts[1]
            accepted.append(engine.metrics().accepted_tokens_per_source.get("history", 0))
            weights = noisy(weights, seed=update, scale=1e-3)
            engine.update_weights(weights)
    assert min(np.diff(accepted[1:])) > 0


def test_a_repeated_prompt_is_drafted_whole(engine):
    """Greedily, with the same weights: each round accepts all drafts but after its first token."""
    history = RolloutHistory()
    first = outputs_of(generate(engine, history, temperature=0))
    before = engine.metrics()
    assert outputs_of(generate(engine, history, temperature=0)) == first
    after = engine.metrics()
    drafts, accepted = (
        getattr(after, name)["history"] - getattr(before, name).get("history", 0)
        for name in ("draft_tokens_per_source", "accepted_tokens_per_source")
    )
    assert accepted == drafts > 100


def test_only_the_window_is_kept(engine):
    history = RolloutHistory(window=2)
    for _ in range(5):
        generate(engine, history)
        engine.update_weights(copied(engine.params.target))
    assert len(history) == 3 * 3 * len(PROMPTS)
    few = RolloutHistory(max_tokens=150)
    generate(engine, few)
    assert few.num_tokens <= 150 and 0 < len(few) < 9


def test_longest_prompts_start_first(engine):
    history = RolloutHistory()
    for prompt, length in zip(PROMPTS, (4, 24, 12), strict=True):
        generate(engine, history, [prompt], max_tokens=length)
    ordered = engine._begin(PROMPTS, SamplingParams(), history, 0.0)
    assert [start.prompt_index for start in ordered] == [1, 2, 0]


def saved(history, tmp_path):
    history.save(tmp_path / "history")
    return (tmp_path / "history").read_bytes()


def test_saving_and_loading(engine, tmp_path):
    history = RolloutHistory()
    generate(engine, history)
    content = saved(history, tmp_path)
    state = history.state()
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", state)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "state", state)
    for other in RolloutHistory.load(tmp_path / "history"), RolloutHistory.of(restored):
        assert all(np.array_equal(x, state[name]) for name, x in other.state().items())
        generate(engine, other)
    (tmp_path / "cut").write_bytes(content[:-30])  # of 4 bytes a token
    with pytest.warns(UserWarning, match="cut short: 8 of its 9 rollouts are whole"):
        assert len(RolloutHistory.load(tmp_path / "cut")) == 8
    (tmp_path / "cut").write_bytes(content[:200])
    with pytest.raises(ValueError, match="has no whole rollout"):
        RolloutHistory.load(tmp_path / "cut")


def test_bad_input(engine, target, tmp_path):
    for bad in {"window": 0}, {"window": 1.5}, {"max_tokens": -1}:
        with pytest.raises(ValueError, match=re.escape(f"{[*bad][0]}={[*bad.values()][0]}")):
            RolloutHistory(**bad)
    with pytest.raises(ValueError, match="not the state of a RolloutHistory"):
        RolloutHistory.of({"tokens": np.zeros(3)})
    history = RolloutHistory()
    generate(engine, history)
    for name in "vocabulary", "model", "tokenizer":
        other = RolloutHistory.of(history.state())
        other._identity[name] = "another"
        with pytest.raises(ValueError, match=f"rollouts of another {name}"):
            generate(engine, other)
    buffer = io.BytesIO(b"no history")
    (tmp_path / "file").write_bytes(buffer.getvalue())
    with pytest.raises(ValueError, match="has no whole rollout"):
        RolloutHistory.load(tmp_path / "file")
    with simulated_engines(), RolloutEngine(target.folder, **SIZES) as plain:
        with pytest.raises(ValueError, match="does not draft from texts"):
            generate(plain, history)
