"""Rollouts drafted from earlier rollouts are the same as without a history."""

import copy
import io
import pickle
import re
from dataclasses import replace

import numpy as np
import orbax.checkpoint as ocp
import pytest
from scipy.special import softmax
from support.engines import SIZES, VOCAB, K, random_prompts, simulated_engines
from support.fits import FIXED_SEED, pvalue
from support.logits import hf_logits
from support.one_thread_ray import OneThread
from support.rollouts import copied, noisy

from specjax import SamplingParams
from specjax.rl import RolloutBatch, RolloutEngine, RolloutHistory, ray_workers
from specjax.rl.ray_workers import RayRollouts

CONFIG = {"method": "suffix", "num_speculative_tokens": K}
PROMPTS = random_prompts(9, 20, 5, vocab_size=VOCAB)


def outputs_of(batch):
    return [(one.prompt_index, one.sample_index, one.token_ids.tolist()) for one in batch]


def generate(engine, history=None, prompts=PROMPTS, reuse_noise=0.0, **params):
    params = {"n": 3, "temperature": 1.0, "max_tokens": 24, "ignore_eos": True, **params}
    sampling = SamplingParams(**params)
    return engine.generate(prompts, sampling, history=history, reuse_noise=reuse_noise)


def counts_of(engine, source):
    metrics = engine.metrics()
    counts = metrics.draft_tokens_per_source, metrics.accepted_tokens_per_source
    return np.array([one.get(source, 0) for one in counts])


@pytest.fixture(scope="module")
def engine(target):
    with (
        simulated_engines(),
        RolloutEngine(target.folder, speculative_config=CONFIG, **SIZES) as engine,
    ):
        yield engine


@pytest.mark.slow
def test_ten_updates_with_and_without_a_history(target):
    """The device is real, and weights change a little in each update."""
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
        reused = generate(engine, history, reuse_noise=1.0, temperature=0.05)
        assert all(one.reuses_noise for one in reused)
        prompts = [one.prompt_token_ids.tolist() for one in reused]
        params = [replace(one.params, n=1, seed=one.seed) for one in reused]
        plain = engine.generate(prompts, params)  # which has the same seeds
        assert [x.token_ids.tolist() for x in plain] == [x.token_ids.tolist() for x in reused]
        periods = [one.accepted_tokens_per_source for one in engine.acceptance()]
    assert [one["history"] for one in periods[1:10]] == np.diff(accepted[1:]).tolist()
    assert min(np.diff(accepted[1:])) > 0


@pytest.mark.slow
def test_the_distribution_with_a_history(target):
    """Counts of second and third tokens are compared with transformers' probabilities."""
    history, prompt, temperature = RolloutHistory(), PROMPTS[2], 0.15
    with RolloutEngine(target.folder, speculative_config=CONFIG, **SIZES) as engine:
        rows = []
        for _ in range(3):
            params = {"n": 150, "max_tokens": 3, "temperature": temperature}
            batch = generate(engine, history, [prompt], **params)
            rows += [one.token_ids for one in batch]
        drafts, accepted = counts_of(engine, "history")
    assert 0.2 * drafts < accepted < 0.95 * drafts
    rows = np.array(rows)
    logits = hf_logits(target.hf, [[*prompt, *row[:2].tolist()] for row in rows])[:, -2:]
    chances = softmax(logits / temperature, axis=-1)
    for i in range(2):
        pairs = zip(rows, chances, strict=True)
        expected, found = np.zeros((2, VOCAB, VOCAB))
        for row, chance in pairs:
            expected[row[i]] += chance[i]
            found[row[i], row[i + 1]] += 1
        assert pvalue(found, expected) > FIXED_SEED


def test_reused_noise_with_unchanged_weights_accepts_everything(engine):
    """Half of each group reuses the last samples of the group before, whatever their lengths."""
    history = RolloutHistory()
    first = generate(engine, history, n=4)
    engine.update_weights(copied(engine.params.target))
    before = counts_of(engine, "replay")
    batch = list(engine.stream(PROMPTS, first[0].params, history=history, reuse_noise=0.5))
    drafts, accepted = counts_of(engine, "replay") - before
    assert accepted == drafts > 80
    earlier = {(one.prompt_index, one.sample_index): one for one in first}
    for one in batch:
        assert one.reuses_noise == (one.sample_index < 2)
        if one.reuses_noise:
            same = earlier[one.prompt_index, 3 - one.sample_index]
            assert one.seed == same.seed and one.token_ids.tolist() == same.token_ids.tolist()
    assert len({one.seed for one in batch}) == len(batch)
    assert RolloutBatch(batch).padded(0).reuses_noise.mean() == 0.5
    assert not any(one.reuses_noise for one in generate(engine, history))


def test_a_whole_group_that_reuses_noise_never_has_new_noise(engine):
    """With unchanged weights, all later groups repeat the first; larger groups add new noise."""
    history, groups = RolloutHistory(), []
    for n in 2, 2, 2, 3:
        batch = generate(engine, history, n=n, reuse_noise=1.0)
        groups.append({(one.prompt_index, one.seed): one.token_ids.tolist() for one in batch})
        assert len(groups[-1]) == n * len(PROMPTS)
        assert sum(one.reuses_noise for one in batch) == 2 * len(PROMPTS) * (len(groups) > 1)
        engine.update_weights(copied(engine.params.target))
    first, *later, largest = groups
    assert all(one == first for one in later) and first.items() < largest.items()


def test_workers_share_a_history(target, monkeypatch):
    """Rollouts of each worker are drafts of both. Noise is the noise of a single engine."""
    monkeypatch.setattr(ray_workers, "import_ray", lambda name: OneThread())
    options = {**SIZES, "speculative_config": CONFIG}
    params = SamplingParams(n=3, temperature=1.0, max_tokens=24, ignore_eos=True)
    history = RolloutHistory()
    with (
        simulated_engines(),
        RolloutEngine(target.folder, **options) as single,
        RayRollouts(target.folder, num_workers=2, group_size=1, **options) as workers,
    ):
        first = workers.generate(PROMPTS, params, history=history)
        assert outputs_of(first) == outputs_of(single.generate(PROMPTS, params))
        assert len(history) == 9 and history._identity["vocabulary"] == VOCAB
        workers.update_weights(copied(single.params.target))
        again = [*workers.stream(PROMPTS[::-1], params, history=history, reuse_noise=1.0)]
        assert all(one.reuses_noise for one in again) and len(history) == 18
        tokens = {one.seed: one.token_ids.tolist() for one in first}
        assert {one.seed: one.token_ids.tolist() for one in again} == tokens
        accepted = [one.accepted_tokens_per_source.get("replay", 0) for one in workers.metrics()]
        assert sum(accepted) > 100 and min(accepted) > 0
        history._identity["model"] = "another"
        with pytest.raises(ValueError, match="rollouts of another model"):
            workers.generate(PROMPTS, params, history=history)


def test_noise_is_not_reused_twice_at_a_time(engine):
    """Noise is not reused if a prompt is given twice, for a fixed seed, or for equal weights."""
    history = RolloutHistory()
    generate(engine, history, seed=5)
    again = generate(engine, history, reuse_noise=1.0, seed=5)
    assert not any(one.reuses_noise for one in again)
    engine.update_weights(copied(engine.params.target))
    batch = generate(engine, history, [PROMPTS[0]] * 2, reuse_noise=0.5, seed=5)
    for i in range(2):
        assert len({one.seed for one in batch if one.prompt_index == i}) == 3
    assert sum(one.reuses_noise for one in batch) == 3


def test_a_repeated_prompt_is_drafted_whole(engine):
    """Greedily and with equal weights, all drafts are accepted after each round's first token."""
    history = RolloutHistory()
    first = outputs_of(generate(engine, history, temperature=0))
    before = counts_of(engine, "history")
    assert outputs_of(generate(engine, history, temperature=0)) == first
    drafts, accepted = counts_of(engine, "history") - before
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
    saved(history, tmp_path)
    state = history.state()
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", state)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "state", state)
    loaded = RolloutHistory.load(tmp_path / "history"), RolloutHistory.of(restored)
    for other in *loaded, copy.deepcopy(history), pickle.loads(pickle.dumps(history)):
        assert all(np.array_equal(x, state[name]) for name, x in other.state().items())
        generate(engine, other)


def test_a_file_that_ends_anywhere(engine, tmp_path):
    """Complete rollouts are used. Otherwise, the error is always the documented one."""
    history, path = RolloutHistory(), tmp_path / "cut"
    generate(engine, history, PROMPTS[2:], n=2, max_tokens=3)
    assert len(history.state()["tokens"]) == 2 * (len(PROMPTS[2]) + 3)
    content = saved(history, tmp_path)
    for end in [*range(0, len(content) - 70, 11), *range(len(content) - 70, len(content))]:
        path.write_bytes(content[:end])
        if end < len(content) - 4 * (len(PROMPTS[2]) + 3):
            with pytest.raises(ValueError, match="has no whole rollout"):
                RolloutHistory.load(path)
        else:
            with pytest.warns(UserWarning, match="cut short: 1 of its 2 rollouts are whole"):
                assert len(RolloutHistory.load(path)) == 1
    for place in range(10, 60, 7):  # a header that is no Python
        path.write_bytes(content[:place] + b"(" + content[place + 1 :])
        with pytest.raises(ValueError, match="has no whole rollout|not the state of"):
            RolloutHistory.load(path)


def test_long_prompts_and_aborted_rollouts_take_no_memory(engine):
    history = RolloutHistory()
    prompt = random_prompts(50, vocab_size=VOCAB)[0]
    for length in range(30, 40):
        prompts = [prompt[:length]]
        generate(engine, history, prompts, n=1, max_tokens=2)
        engine._begin([prompt[length - 20 : length]], SamplingParams(), history, 0.0)
    assert len(history) == 10 and len(history._prompts) == 11
    assert len(history.state()["tokens"]) == 10 * (24 + 2)


def test_bad_input(engine, target, tmp_path):
    for bad in {"window": 0}, {"window": 1.5}, {"max_tokens": -1}:
        with pytest.raises(ValueError, match=re.escape(f"{[*bad][0]}={[*bad.values()][0]}")):
            RolloutHistory(**bad)
    with pytest.raises(ValueError, match="not the state of a RolloutHistory"):
        RolloutHistory.of({"tokens": np.zeros(3)})
    history = RolloutHistory()
    with pytest.raises(ValueError, match="prompt 0"):
        generate(engine, history, [[10**9]])
    assert history._identity == {}  # other engines can use it
    generate(engine, history)
    state, many = history.state(), np.full(9, -1)
    cut = [{name: state[name][:-1]} for name in state if name != "identity"]
    values = {"lengths": many}, {"tokens": state["tokens"] + VOCAB}, {"seeds": many * 0.5}
    for bad in (*values, *cut):
        with pytest.raises(ValueError, match=f"not the state of a RolloutHistory: .*{[*bad][0]}"):
            RolloutHistory.of(state | bad)
    for path, error in (tmp_path / "none", FileNotFoundError), (tmp_path, IsADirectoryError):
        with pytest.raises(error, match=f"path='{path}' cannot be read.*RolloutHistory.save wrote"):
            RolloutHistory.load(path)
    for bad in -0.1, 1.5, "half", True:
        with pytest.raises(ValueError, match=f"reuse_noise={bad!r} must be a fraction"):
            generate(engine, history, reuse_noise=bad)
    for bad in "hist", history.state():
        with pytest.raises(ValueError, match="^history=.* must be a RolloutHistory"):
            generate(engine, bad)
    with pytest.raises(ValueError, match="reuse_noise=0.5 needs a history"):
        generate(engine, reuse_noise=0.5)
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
