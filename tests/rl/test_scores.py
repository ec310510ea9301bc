"""Log-probabilities and features equal those of transformers' forward pass over the text.

transformers has the weights that generated the text. `support.asked.Asked` applies the options.
"""

from dataclasses import replace

import numpy as np
import pytest
from support.engines import VOCAB
from support.refusals import refusal
from support.rollouts import (
    PROMPTS,
    SAMPLED,
    TOLERANCE,
    assert_close,
    changed,
    log_softmax,
    logits_of,
)

from specjax import SamplingParams

pytestmark = pytest.mark.slow

SHAPES = [
    {"temperature": 1.3, "top_k": 5},
    {"temperature": 0.8, "top_p": 0.6},
    {"temperature": 1.5, "top_k": 12, "top_p": 0.9, "min_p": 0.02},
    {"temperature": 0.9, "repetition_penalty": 1.3, "frequency_penalty": 0.4},
    {"temperature": 1.0, "logit_bias": {3: 4.0}, "stop_token_ids": [2], "min_tokens": 9},
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_log_probabilities_are_those_of_the_trainers_own_forward(engine, hf, asked, shape):
    """With temperature, top-p, top-k and so on; when tokens are drawn, and when they are scored."""
    engine.update_weights(changed(hf, 5))
    params = SamplingParams(n=2, max_tokens=20, **shape)
    batch = engine.generate(PROMPTS, params)
    scores = engine.score(batch)
    again = engine.score([(one.prompt_token_ids, one.token_ids) for one in batch], params)
    expected = []
    for one, score, same in zip(batch, scores, again, strict=True):
        logits, tokens = logits_of(hf, one), one.token_ids.tolist()
        stops = list(params.stop_token_ids)
        request = asked(params, one.prompt_token_ids.tolist(), [], stop_ids=stops)
        drawn = [
            np.log(request.then(*tokens[:i]).probs(logits[i])[token])
            for i, token in enumerate(tokens)
        ]
        raw = log_softmax(logits)[np.arange(len(tokens)), tokens]
        expected.append(drawn)
        for found in one, score, same:
            np.testing.assert_allclose(found.raw_logprobs, raw, atol=TOLERANCE)
    for found in batch, scores, again:
        assert_close([one.logprobs for one in found], expected, params)


def test_raw_ones_only_if_asked_for(build):
    engine = build(drafts=False)
    (one,) = engine.generate([PROMPTS[0]], replace(SAMPLED, n=1))
    assert one.raw_logprobs is None and engine.score([one])[0].raw_logprobs is None


def test_features_are_the_targets_states(engine, hf):
    """States after the norm give transformers' logits. Auxiliary states are also transformers'."""
    import torch

    batch = engine.generate(PROMPTS, SAMPLED)
    scores = engine.score(batch, features=True)
    weight = hf.get_output_embeddings().weight.detach().numpy().copy()
    for one, score in zip(batch, scores, strict=True):
        rows = slice(len(one.prompt_token_ids) - 1, None)
        np.testing.assert_allclose(
            log_softmax(score.hidden[rows] @ weight.T), log_softmax(logits_of(hf, one)), atol=1e-3
        )
        tokens = [*one.prompt_token_ids.tolist(), *one.token_ids.tolist()][:-1]
        with torch.no_grad():
            states = hf(torch.tensor([tokens]), output_hidden_states=True).hidden_states
        parts = np.split(score.auxiliary, len(engine.drafter.aux_layers), axis=1)
        for i, part in zip(engine.drafter.aux_layers, parts, strict=True):
            if i == engine.target.num_layers:  # transformers has the last one normed
                part = hf.model.norm(torch.tensor(part)).detach().numpy()
            np.testing.assert_allclose(part, states[i][0].numpy(), atol=1e-3)


def test_nothing_is_scored_of_nothing(engine):
    scores = engine.score([([1, 2], []), ([1], [2])])
    assert [len(score.logprobs) for score in scores] == [0, 1]
    assert engine.score([]) == []


def test_scores_of_a_prompt_that_is_cached(engine):
    """Cached pages of the prompt are used, and scores do not change."""
    prompt, output = list(range(1, 25)), [3, 1, 4, 1, 5]
    (first,) = engine.score([(prompt, output)])
    before = engine.metrics().prefix_cache_hits
    (again,) = engine.score([(prompt, output)])
    assert engine.metrics().prefix_cache_hits > before
    np.testing.assert_allclose(first.logprobs, again.logprobs, atol=TOLERANCE)


BAD = [
    ([([1, 2], [VOCAB])], "32"),
    ([([1, -1], [3])], "-1"),
    ([([], [3])], "empty"),
    ([([1], [2] * 128)], "128 tokens"),
    ([([1], [2]), 7], "sample 1"),
    ([([1], [1.5])], "integers"),
]


@pytest.mark.parametrize("samples, word", BAD, ids=str)
def test_tokens_that_cannot_be_scored(engine, samples, word):
    before = engine.metrics().num_prompt_tokens
    with pytest.raises(ValueError, match=word):
        engine.score(samples)
    assert engine.metrics().num_prompt_tokens == before


@pytest.mark.parametrize("features", ["x", 1, None])
def test_features_are_asked_for_or_not(engine, features):
    for call in engine.score, engine.check_score:
        refusal(lambda call=call: call([([1], [2])], features=features), f"features={features!r}")
