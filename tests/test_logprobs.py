"""Log-probabilities are the model's own for every token, whether drafted or not.

The oracle is transformers' log_softmax over the finished text. For processed log-probabilities,
`support.asked.Asked` processes transformers' logits.
"""

import math
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
from scipy.special import log_softmax
from support.engines import (
    SIZES,
    VERIFICATIONS,
    K,
    generate,
    generate_tokens,
    make_llm,
    patched,
    random_prompts,
    simulated_engines,
)
from support.marks import marked
from support.shared_models import (
    EOS,
    VOCAB,
    eagle3,
    llama,
    of_few_words,
    prepare_everything,
    without_end,
)

from specjax import SamplingParams

pytestmark = pytest.mark.slow

CHUNK = SIZES["prefill_shapes"][0][1]
TOLERANCE = 1e-4
LENGTHS = (5, 1, CHUNK + 1, 2 * CHUNK + 6, 2, CHUNK)
PROMPTS = random_prompts(*LENGTHS, vocab_size=VOCAB)


@pytest.fixture(scope="module")
def folder(checkpoints):
    """A target with a tokenizer of single characters, and without an end of sequence."""
    folder = of_few_words(checkpoints, llama(checkpoints).folder)
    return checkpoints.with_letters(without_end(checkpoints, folder))


@pytest.fixture(scope="module")
def head(checkpoints):
    return of_few_words(checkpoints, eagle3(checkpoints).folder)


@pytest.fixture(scope="module")
def llm(folder, head):
    with make_llm(folder, "eagle3", head) as llm:
        prepare_everything(llm)
        yield llm


@pytest.fixture(scope="module")
def plain(folder):
    with make_llm(folder) as llm:
        prepare_everything(llm)
        yield llm


@pytest.fixture(scope="module")
def logits_after(folder):
    """Return a function that returns transformers' logits f64[L, V] after each token of a text."""
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def score(tokens):
        with torch.no_grad():
            return model(torch.tensor([tokens])).logits[0].double().numpy()

    return score


def assert_entry(entry, token, num_top, expected):
    """Check that an entry has its token, then the most likely tokens, with `expected` f64[V].

    A token that cannot be drawn has no rank.
    """
    assert next(iter(entry)) == token and entry[token].logprob > -math.inf
    assert len(entry) == num_top + (token not in list(entry)[1:] and entry[token].rank > num_top)
    for i, one in entry.items():
        assert one.logprob == pytest.approx(expected[i], abs=TOLERANCE)
        above = (expected > expected[i] + TOLERANCE).sum()
        at_least = (expected >= expected[i] - TOLERANCE).sum()
        assert above < one.rank <= max(at_least, above + 1), (i, one)
    top = sorted((one.rank, one.logprob) for one in entry.values() if one.rank <= num_top)
    top = [pair for pair in top if pair[1] > -math.inf]
    best = np.sort(expected[expected > -math.inf])[::-1][:num_top]
    assert [rank for rank, _ in top] == list(range(1, len(best) + 1))
    np.testing.assert_allclose([logprob for _, logprob in top], best, atol=TOLERANCE)


def assert_raw(output, params, logits_after):
    """Check all reported log-probabilities of a prompt and its outputs against transformers."""
    prompt = output.prompt_token_ids
    for sample in output.outputs:
        if params.logprobs is None:
            assert sample.logprobs is None and sample.cumulative_logprob is None
            continue
        logits = logits_after(prompt + sample.token_ids)[len(prompt) - 1 :]
        expected = log_softmax(logits, axis=-1)
        assert len(sample.logprobs) == len(sample.token_ids)
        for i, token in enumerate(sample.token_ids):
            assert_entry(sample.logprobs[i], token, params.logprobs, expected[i])
        total = sum(expected[i, token] for i, token in enumerate(sample.token_ids))
        assert sample.cumulative_logprob == pytest.approx(total, abs=1e-3)
    assert_raw_prompt(output, params, logits_after)


def assert_raw_prompt(output, params, logits_after):
    prompt = output.prompt_token_ids
    if params.prompt_logprobs is None:
        assert output.prompt_logprobs is None
        return
    assert len(output.prompt_logprobs) == len(prompt) and output.prompt_logprobs[0] is None
    expected = log_softmax(logits_after(prompt), axis=-1)
    for i, token in enumerate(prompt[1:]):
        assert_entry(output.prompt_logprobs[i + 1], token, params.prompt_logprobs, expected[i])


def assert_all_raw(outputs, params, logits_after):
    for output, one in zip(outputs, params, strict=True):
        assert_raw(output, one, logits_after)


def without_logprobs(outputs):
    return [
        (sample.index, sample.token_ids, sample.text, sample.finish_reason)
        for output in outputs
        for sample in output.outputs
    ]


# --- the model's ----------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_accepted_recovered_and_bonus_tokens(llm, plain, logits_after, temperature):
    """All of them have the model's log-probabilities, with speculation and without."""
    params = [
        SamplingParams(temperature=temperature, seed=i, max_tokens=24, logprobs=i % 6)
        for i in range(len(PROMPTS))
    ]
    before = llm.metrics()
    outputs = generate(llm, PROMPTS, params)
    after = llm.metrics()
    accepted = np.subtract(
        after.num_accepted_tokens_per_pos, before.num_accepted_tokens_per_pos or (0,) * K
    )
    assert after.num_drafts - before.num_drafts > accepted[0] > accepted[-1], "recovered tokens"
    # Drafts that share the target's noise are right more often.
    assert accepted[-1] > 0 or temperature == 0, "bonus tokens"
    assert_all_raw(outputs, params, logits_after)
    without = generate(plain, PROMPTS, params)
    assert without_logprobs(outputs) == without_logprobs(without)
    assert_all_raw(without, params, logits_after)


def test_requests_that_ask_beside_ones_that_do_not(llm, logits_after):
    """Some prompts are longer than a chunk, and some requests generate only one token.

    All samples but the first prefill only the end of the prompt.
    """
    wishes = [{}, {"logprobs": 3}, {"prompt_logprobs": 2}, {"logprobs": 0}, {}, {"logprobs": 20}]
    wishes += [{"logprobs": (None, 0, 4)[i % 3], "prompt_logprobs": i % 5} for i in range(6)]
    params = [
        SamplingParams(temperature=1.0, seed=i, max_tokens=(12, 1, 2)[i % 3], n=1 + i % 3, **wish)
        for i, wish in enumerate(wishes)
    ]
    outputs = generate(llm, PROMPTS * 2, params)
    assert_all_raw(outputs, params, logits_after)
    bare = [replace(one, logprobs=None, prompt_logprobs=None) for one in params]
    assert without_logprobs(outputs) == without_logprobs(generate(llm, PROMPTS * 2, bare))


def test_tokens_come_with_their_text(llm):
    params = SamplingParams(temperature=0, max_tokens=5, logprobs=4, prompt_logprobs=1)
    (output,) = generate(llm, [[1, 2, 3]], params)
    (sample,) = output.outputs
    for entry in [*sample.logprobs, *output.prompt_logprobs[1:]]:
        for token, one in entry.items():
            assert one.decoded_token == llm.tokenizer.decode_token(token)
    pairs = zip(sample.token_ids, sample.logprobs, strict=True)
    assert "".join(entry[token].decoded_token for token, entry in pairs) == sample.text


def test_a_stop_cuts_them_with_the_tokens(llm, logits_after):
    """A stop text or stop id may be anywhere in an accepted run."""
    runs, commit = [], llm.engine.scheduler.commit

    def watched(plan, outputs):
        num_kept, finished = commit(plan, outputs)
        runs.extend(zip(outputs, num_kept, strict=True))
        return num_kept, finished

    prompts = [[4, 9, seed] for seed in range(16)]
    free = [SamplingParams(seed=i, max_tokens=16, logprobs=2) for i in range(len(prompts))]
    texts = generate_tokens(llm, prompts, free)
    # The end has no text.
    stops = [next(t for t in tokens[2 + i % 9 :] if t != EOS) for i, tokens in enumerate(texts)]
    for wishes in (
        [{"stop_token_ids": [stop]} for stop in stops],
        [{"stop": llm.tokenizer.decode([stop])} for stop in stops],
    ):
        params = [replace(one, **wish) for one, wish in zip(free, wishes, strict=True)]
        with patched(llm.engine.scheduler, "commit", watched):
            outputs = generate(llm, prompts, params)
        assert_all_raw(outputs, params, logits_after)
        for output, tokens, stop in zip(outputs, texts, stops, strict=True):
            assert output.outputs[0].token_ids == tokens[: tokens.index(stop) + 1]
            assert output.outputs[0].finish_reason == "stop"
    assert sum(0 < count < len(row.tokens) for row, count in runs) >= 3


@pytest.mark.parametrize("is_simulated", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_vocabulary_of_fewer_tokens_than_may_be_asked_for(checkpoints, is_simulated):
    """The default of max_logprobs may be larger than the vocabulary."""
    small = checkpoints.target("llama", vocab_size=12)
    with simulated_engines() if is_simulated else nullcontext(), make_llm(small.folder) as llm:
        params = SamplingParams(temperature=0, max_tokens=2, logprobs=12)
        (output,) = generate(llm, [1], params)
        assert [len(entry) for entry in output.outputs[0].logprobs] == [12, 12]
        with pytest.raises(ValueError, match="logprobs=13"):
            generate(llm, [1], SamplingParams(logprobs=13))


@pytest.mark.parametrize("method", marked(VERIFICATIONS, slow=["block"]))
def test_other_verifications_report_the_model_too(folder, head, logits_after, method):
    """The steps report log-probabilities, and do no other optional work."""
    with make_llm(folder, "eagle3", head, speculation=VERIFICATIONS[method]) as llm:
        for temperature in 0, 1:
            params = SamplingParams(temperature=temperature, seed=3, max_tokens=24, logprobs=3)
            outputs = generate(llm, PROMPTS, params)
            assert_all_raw(outputs, [params] * len(PROMPTS), logits_after)
        assert llm.metrics().num_accepted_tokens > 0


# --- what is drawn from ---------------------------------------------------------------------------

# Parameters of a request, and the bad words' token ids.
SHAPED = [
    {"temperature": 0.0},
    {"temperature": 0.7},
    {"temperature": 1.3, "top_k": 5},
    {"temperature": 0.8, "top_p": 0.6},
    {"temperature": 1.0, "min_p": 0.1},
    {"temperature": 0.9, "repetition_penalty": 1.4},
    {"temperature": 0.0, "presence_penalty": 1.1, "frequency_penalty": -0.4},
    {"temperature": 1.0, "logit_bias": {3: 4.0, 7: -2.5}, "allowed_token_ids": range(3, 25)},
    {
        "temperature": 1.2,
        "top_k": 12,
        "top_p": 0.9,
        "min_p": 0.02,
        "repetition_penalty": 0.8,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.3,
        "logit_bias": {2: 1.0},
        "stop_token_ids": [2],
        "min_tokens": 10,
    },
]


def test_processed_ones_are_of_what_was_drawn_from(folder, head, logits_after, asked):
    """Requests have different options and run two at a time. Prompt log-probabilities stay raw."""
    params = [
        SamplingParams(seed=i, max_tokens=16, logprobs=4, prompt_logprobs=i % 3, **fields)
        for i, fields in enumerate(SHAPED)
    ]
    prompts = [PROMPTS[i % len(PROMPTS)] for i in range(len(params))]
    with make_llm(folder, "eagle3", head, logprobs_mode="processed_logprobs") as llm:
        outputs = generate(llm, prompts, params)
    for prompt, output, one in zip(prompts, outputs, params, strict=True):
        assert_raw_prompt(output, one, logits_after)
        (sample,) = output.outputs
        assert len(sample.token_ids) >= 10
        logits = logits_after(prompt + sample.token_ids)[len(prompt) - 1 :]
        request = asked(one, prompt, stop_ids=one.stop_token_ids)
        for i, token in enumerate(sample.token_ids):
            now = request.then(*sample.token_ids[:i])
            edited = np.array(now.edit(logits[i]))
            kept = np.where(now.kept(edited.tolist()), edited, -math.inf)
            expected = log_softmax(kept / (one.temperature or 1.0))
            assert_entry(sample.logprobs[i], token, one.logprobs, expected)
