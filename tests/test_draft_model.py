"""A model as a drafter: its cached values equal those of a new run over all tokens.

If the target drafts for itself, every draft is right, unless a row of the drafter's cache is
missing, outdated or misplaced. Rows may go wrong after rounds that accept all or some drafts, after
rounds without drafts, after cached prefixes and after preemption.
"""

import json
import shutil
from dataclasses import dataclass, replace

import jax.numpy as jnp
import numpy as np
import pytest
from support.dynamic_k import InTurn
from support.engines import K, generate_tokens, give_pages, hold_pages, make_llm, random_prompts
from support.shared_models import NUM_SNAPSHOTS, VOCAB, hybrid, llama

from specjax import SamplingParams
from specjax.checkpoint.errors import CheckpointError
from specjax.config import SpeculativeConfig
from specjax.device.drafters import draft_model
from specjax.device.drafters.registry import load_drafter
from specjax.device.models.registry import describe_model, read_config
from specjax.host.drafts.suggester import is_used
from specjax.host.drafts.text_index import NOTHING, Continuation
from specjax.host.speculation.policy import StaticPolicy

pytestmark = pytest.mark.slow

PROMPTS = random_prompts(1, 5, 32, 33, 40, 64, 7, 31, vocab_size=VOCAB - 1, seed=1)


MOST = 101  # the drafter's positions, 32 and whole rounds; only one test goes further


@pytest.fixture(scope="module", params=["llama", pytest.param("hybrid", marks=pytest.mark.nightly)])
def folder(request, checkpoints):
    return llama(checkpoints).folder if request.param == "llama" else hybrid(checkpoints)


@pytest.fixture(scope="module")
def llm(folder, tmp_path_factory):
    """An LLM whose target drafts for itself, with another K in every round."""
    drafter = shutil.copytree(folder, tmp_path_factory.mktemp("drafter") / "same")
    config = json.loads((drafter / "config.json").read_text())
    config["max_position_embeddings"] = MOST
    (drafter / "config.json").write_text(json.dumps(config))
    with make_llm(folder, "draft_model", drafter, num_snapshots=NUM_SNAPSHOTS) as llm:
        llm.engine.set_policy(InTurn(K, 1, 0, K, 0, 0, 1, 1, K, K))
        yield llm


@pytest.fixture(scope="module")
def plain(folder):
    with make_llm(folder, num_snapshots=NUM_SNAPSHOTS) as plain:
        yield plain


def params_of(temperature):
    free = SamplingParams(temperature=temperature, ignore_eos=True)
    return [replace(free, seed=i, max_tokens=(20, 7, 31, 2)[i % 4]) for i in range(len(PROMPTS))]


def assert_always_right(llm, plain, prompts, params):
    """Check that tokens are as without drafts, and that all usable drafts were accepted."""
    before = llm.metrics()
    assert generate_tokens(llm, prompts, params) == generate_tokens(plain, prompts, params)
    after = llm.metrics()
    num_drafts = after.num_draft_tokens - before.num_draft_tokens
    assert after.num_accepted_tokens - before.num_accepted_tokens == num_drafts > 0


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_target_that_drafts_for_itself_is_always_right(llm, plain, temperature):
    assert_always_right(llm, plain, PROMPTS, params_of(temperature))


def test_it_is_right_after_a_cached_prefix(llm, plain):
    prompt, params = PROMPTS[0] * 40, params_of(0.0)[0]
    generate_tokens(llm, prompt, params)
    before = llm.metrics().prefix_cache_hits
    assert_always_right(llm, plain, [*prompt, 3, 5], params)
    assert llm.metrics().prefix_cache_hits > before


def test_it_is_right_after_a_preemption(llm, plain):
    prompts = [prompt for prompt in PROMPTS if 30 < len(prompt) < 50]
    params = [replace(one, max_tokens=40) for one in params_of(0.8)[: len(prompts)]]
    before = llm.metrics().num_preemptions
    taken = hold_pages(llm, 20)
    try:
        assert_always_right(llm, plain, prompts, params)
    finally:
        give_pages(llm, taken)
    assert llm.metrics().num_preemptions > before


class Texts:
    """A source that knows all outputs. It adds a wrong token at times, or returns nothing."""

    name = "texts"

    def __init__(self, texts):
        self._texts, self._rng = texts, np.random.default_rng(0)

    def begin_step(self):
        pass

    def finish(self, sample):
        pass

    def continuation(self, sample, num_in_flight, count):
        known = sample.token_ids
        (text,) = (text for text in self._texts if text[: len(known)] == known)
        tokens = text[len(known) :][: num_in_flight + count]
        kind = self._rng.integers(4)
        if kind > 1 and len(tokens) > num_in_flight:
            wrong = self._rng.integers(num_in_flight, len(tokens))
            tokens[wrong] = (tokens[wrong] + 1) % (VOCAB - 1)
        return NOTHING if not kind else Continuation(tokens, float(K))


@dataclass(frozen=True)
class Stumbling(draft_model.DraftModel):
    """Its drafts are wrong at every third position."""

    def _run(self, params, tokens, rows, last, caches, context):
        logits, caches = super()._run(params, tokens, rows, last, caches, context)
        places = rows.by_request(rows.positions)[jnp.arange(len(last)), last] + 1
        wrong = jnp.roll(logits, 1, axis=1)
        return jnp.where((places % 3 == 0)[:, None], wrong, logits), caches


def test_it_is_right_after_drafts_from_texts(folder, plain, monkeypatch):
    """Texts are accepted where the model had run other drafts. It then goes on from the texts."""
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    expected = generate_tokens(plain, PROMPTS, params)
    texts = [prompt + output for prompt, output in zip(PROMPTS, expected, strict=True)]
    monkeypatch.setattr(draft_model, "DraftModel", Stumbling)
    own, others = [], []  # rounds: accepted drafts, and those before the model's first wrong one
    with make_llm(folder, "draft_model", folder, speculation={"with": ["suffix"]}) as llm:
        llm.engine.set_policy(InTurn(K, K, 0, K))
        suggester = llm.engine.scheduler.suggester
        suggester.sources, suggester._ratios = (Texts(texts),), {"texts": 1e9}
        learn = suggester.learn

        def noting(sequences, paths, outputs, num_kept):
            for one, path, row, kept in zip(sequences, paths, outputs, num_kept, strict=True):
                if kept and not one.is_finished:
                    place = len(one.token_ids) - kept
                    found = kept - 1, min(row.num_drafts, -place % 3)
                    (others if is_used(path, one, kept) else own).append(found)
            learn(sequences, paths, outputs, num_kept)

        monkeypatch.setattr(suggester, "learn", noting)
        assert generate_tokens(llm, PROMPTS, params) == expected
    assert len(own) > 10 and all(accepted == right for accepted, right in own)
    assert sum(accepted > right for accepted, right in others) > 5


def test_it_drafts_nothing_after_the_positions_it_was_made_for(llm, plain):
    """The drafter is the target with a smaller maximum position."""
    params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=80)
    before, policy = llm.metrics(), llm.engine.scheduler.policy
    llm.engine.set_policy(StaticPolicy(K))
    assert_always_right(llm, plain, PROMPTS[2], params)
    llm.engine.set_policy(policy)
    num_drafts = llm.metrics().num_draft_tokens - before.num_draft_tokens
    # Up to there, each round has K drafts and one token of the target.
    num_rounds, rest = divmod(MOST - len(PROMPTS[2]), K + 1)
    assert rest == 0 and num_drafts == num_rounds * K


def test_another_vocabulary_needs_the_targets_tokenizer(checkpoints):
    other = checkpoints.target("llama", vocab_size=VOCAB - 1).folder
    target = describe_model(read_config(llama(checkpoints).folder))
    config = SpeculativeConfig(method="draft_model", model=str(other), num_speculative_tokens=2)
    with pytest.raises(CheckpointError, match="vocab_size=95 .* the target's 96, .* Model value"):
        load_drafter(other, config, target, np.dtype("float32"))


@pytest.mark.nightly
def test_a_recurrent_drafter_goes_on_from_a_snapshot_of_its_own(checkpoints):
    """The target is not recurrent, so it would need no snapshots."""
    prompt = PROMPTS[5]
    longer = [*prompt, 3, 5]
    target, drafter = llama(checkpoints).folder, hybrid(checkpoints)
    with make_llm(target, "draft_model", drafter, k=1, compile_ahead=False) as llm:

        def state_after(prompt):
            llm.generate([prompt], SamplingParams(max_tokens=1), use_tqdm=False)
            caches = llm.engine.programs.state.drafter.caches
            return np.concatenate([c.state[:, 0].ravel() for c in caches if hasattr(c, "state")])

        cold = state_after(longer)
        llm.reset_prefix_cache()
        state_after(prompt)
        hits = llm.metrics().prefix_cache_hits
        other = state_after(prompt[:7])  # what is in the slot otherwise
        assert np.abs(other - cold).max() > 0.01
        np.testing.assert_allclose(state_after(longer), cold, rtol=0, atol=1e-5)
        assert llm.metrics().prefix_cache_hits > hits
