"""Structured outputs can be parsed, at any temperature, with speculation and other requests.

The model is tiny and random, over printable ASCII, so it may generate any text.
"""

import json
import re
import warnings
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
from support.engines import (
    EXACT,
    VERIFICATIONS,
    assert_idle,
    generate,
    generate_tokens,
    make_llm,
    random_prompts,
    tokens_of,
)
from support.shared_models import EOS, eagle3, llama, prepare_everything, without_end

from specjax import SamplingParams

pytest.importorskip("llguidance")
pytestmark = pytest.mark.usefixtures("small_test")

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "count": {"type": "integer", "minimum": -5, "maximum": 150},
        "kinds": {"type": "array", "items": {"enum": ["a", 1, None]}, "maxItems": 2},
        "is_known": {"type": "boolean"},
    },
    "required": ["name", "count", "kinds"],
    "additionalProperties": False,
}
CHOICES = ["yes", "no", "yes, but no", "I don't know", "{"]
SUMS = r"""
start: term (op term){1,3} " = " NUMBER
term: NUMBER | "(" term op term ")"
op: " + " | " - " | "*"
NUMBER: /[1-9][0-9]{0,2}/
"""


def is_of_schema(text):
    value = json.loads(text)
    keys = ["name", "count", "kinds", "is_known"]
    assert list(value) in (keys, keys[:3]), text
    assert isinstance(value["name"], str) and len(value["name"]) <= 8
    assert type(value["count"]) is int and -5 <= value["count"] <= 150
    assert len(value["kinds"]) <= 2 and all(kind in ("a", 1, None) for kind in value["kinds"])
    return isinstance(value.get("is_known", True), bool)


def is_sum(text):
    left, _, right = text.partition(" = ")
    assert re.fullmatch(r"[1-9]\d{0,2}", right), text
    return isinstance(eval(left, {"__builtins__": {}}), int)


# What is asked for, and whether a text is that. A term of a sum may nest, and need not end in time.
KINDS = {
    "json": ({"json": SCHEMA}, is_of_schema),
    "regex": (
        {"regex": r"[A-Z][a-z ]{5,30}(\.|!)"},
        re.compile(r"[A-Z][a-z ]{5,30}(\.|!)").fullmatch,
    ),
    "choice": ({"choice": CHOICES}, CHOICES.__contains__),
    "grammar": ({"grammar": SUMS}, is_sum),
}


PROMPTS = random_prompts(*(1 + 5 * i % 33 for i in range(24)), vocab_size=EOS)


@pytest.fixture(scope="module")
def folder(checkpoints):
    return checkpoints.with_letters(llama(checkpoints).folder)


@pytest.fixture(scope="module")
def head(checkpoints):
    return eagle3(checkpoints).folder


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


def wishes(count, *, kinds=KINDS, **params):
    """Return parameters of `count` requests of the kinds in turn. A request's seed is its index."""
    names = list(kinds)
    params = {"temperature": 1.0, "max_tokens": 90} | params
    return [
        SamplingParams(seed=i, structured_outputs=KINDS[names[i % len(names)]][0], **params)
        for i in range(count)
    ]


def assert_all_parse(outputs, params):
    """Check that each output ended by itself and is valid. A grammar's sum may be cut off."""
    pairs = [(s, one) for o, one in zip(outputs, params, strict=True) for s in o.outputs]
    for sample, one in pairs:
        field, value = next((f, v) for f, v in vars(one.structured_outputs).items() if v)
        if field == "grammar" and sample.finish_reason == "length":
            continue
        assert sample.finish_reason == "stop" and sample.stop_reason is None, sample
        assert sample.token_ids.count(EOS) == 1 and sample.token_ids[-1] == EOS
        assert KINDS[field][1](sample.text), (value, sample.text)


# --- it parses ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_speculation_changes_nothing(llm, plain):
    """Sums are sampled, because greedy sums would nest without end."""
    params = wishes(12) + wishes(12, kinds=["json", "regex", "choice"], temperature=0.0)
    outputs = generate(llm, PROMPTS, params)
    assert_all_parse(outputs, params)
    assert llm.metrics().num_accepted_tokens > 0
    assert tokens_of(outputs) == generate_tokens(plain, PROMPTS, params)


@pytest.mark.nightly
@pytest.mark.parametrize("method", VERIFICATIONS)
def test_other_verifications(folder, head, method):
    """The steps follow grammars, and do no other optional work."""
    with make_llm(folder, "eagle3", head, speculation=VERIFICATIONS[method]) as llm:
        for temperature in 1.0, 0.0:
            params = wishes(24, temperature=temperature, kinds=["json", "regex", "choice"])
            assert_all_parse(generate(llm, PROMPTS, params), params)
            assert_dead_ends(llm, temperature, DEAD_ENDS)
        assert llm.metrics().num_accepted_tokens > 0


@pytest.mark.slow
def test_any_mix_of_wishes(llm, plain):
    """Grammars with any other options, and requests without grammars, give plain decoding's tokens.

    A grammar ends an output even if EOS is ignored, so later tokens of the step are dropped. If EOS
    is likely, EOS and tokens after it are drafted and accepted.
    """
    rng, space = np.random.default_rng(5), llm.tokenizer.encode(" ")[0]

    def some(*values):
        return values[rng.integers(len(values))]

    def any_params(i):
        return SamplingParams(
            seed=i,
            n=some(1, 1, 1, 2),
            temperature=some(0.0, 0.7, 1.0, 1.5),
            max_tokens=int(rng.integers(1, 80)),
            top_k=some(0, 0, 5),
            top_p=some(1.0, 1.0, 0.8),
            min_p=some(0.0, 0.02),
            repetition_penalty=some(1.0, 1.0, 1.2),
            frequency_penalty=some(0.0, 0.3),
            logit_bias=some({}, {3: 1.5, EOS: 4.0}, {EOS: 30.0}),
            bad_words=some((), ("q", "zz")),
            stop=some((), ("e", "!!", '"c'), ("ing",)),
            stop_token_ids=some((), (), (space,)),
            ignore_eos=some(True, False),
            logprobs=some(None, 0, 3),
            structured_outputs=some(None, *(outputs for outputs, _ in KINDS.values())),
        )

    params = [any_params(i) for i in range(80)]
    prompts = [PROMPTS[i % len(PROMPTS)] for i in range(80)]
    outputs = generate(llm, prompts, params)
    expected = generate(plain, prompts, params)
    for one, output, other in zip(params, outputs, expected, strict=True):
        for sample, same in zip(output.outputs, other.outputs, strict=True):
            names = ("token_ids", "text", "finish_reason", "stop_reason")
            assert [getattr(sample, n) for n in names] == [getattr(same, n) for n in names], one
            assert not any(stop in sample.text for stop in one.stop)
            assert not set(one.stop_token_ids) & set(sample.token_ids[:-1])
            if one.logprobs is not None:
                assert len(sample.logprobs) == len(sample.token_ids)
                assert sample.cumulative_logprob == pytest.approx(same.cumulative_logprob, abs=1e-3)
            wanted = one.structured_outputs
            if wanted and sample.finish_reason == "stop" and sample.stop_reason is None:
                field = next(f for f, v in vars(wanted).items() if v)
                assert KINDS[field][1](sample.text), (one, sample.text)
                assert sample.token_ids.index(EOS) == len(sample.token_ids) - 1
    reasons = {type(sample.stop_reason) for output in outputs for sample in output.outputs}
    assert reasons == {type(None), str, int}
    assert_idle(llm)


# --- ends -----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_model_without_an_end_of_sequence(checkpoints, folder, head):
    """An output ends when no token can follow; otherwise, it runs to its maximum length."""
    with make_llm(without_end(checkpoints, folder), "eagle3", head) as llm:
        prepare_everything(llm)
        params = wishes(12, kinds=["json", "regex"])
        choice = {"choice": ["xxxxx", "xxxxxy"]}
        params[3::4] = [
            replace(one, structured_outputs=choice, logit_bias={llm.tokenizer.encode("x")[0]: 30.0})
            for one in params[3::4]
        ]
        for output, one in zip(generate(llm, PROMPTS[:12], params), params, strict=True):
            sample = output.outputs[0]
            if one.logit_bias:  # "y" may follow, and must then
                assert sample.text == "xxxxxy"
            else:
                field = "json" if one.structured_outputs.json else "regex"
                assert KINDS[field][1](sample.text), sample.text
            assert sample.finish_reason == "stop" and sample.stop_reason is None
        assert_idle(llm)


def nothing_left(tokens, length, logits):
    return jnp.where(length >= 5, -jnp.inf, logits)


def not_a_number(tokens, length, logits):
    return logits.at[7].set(jnp.where(length >= 3, jnp.nan, 0.0))


DEAD_ENDS = [  # wishes that rule out all tokens at some place, and how many come before it
    ({"structured_outputs": {"regex": "ab"}, "min_tokens": 10}, 2, "structured_outputs, min_"),
    (
        {"structured_outputs": {"choice": ["aaaaa"]}, "allowed_token_ids": [65, 5], "n": 2}
        | {"bad_words": ["aaa"]},
        2,
        "structured_outputs, allowed_token_ids, bad_words",
    ),
    ({"allowed_token_ids": [5, 6], "bad_words": ["%%", "%&", "&&", "&%"]}, 1, "bad_words"),
    ({"logits_processors": [nothing_left]}, 2, "logits_processors"),
    ({"logits_processors": [not_a_number]}, 0, "logits_processors"),
]


def assert_dead_ends(llm, temperature, wishes):
    """Check that outputs end with an error where no token is allowed; others are not affected."""
    free = SamplingParams(seed=1, temperature=1.0, max_tokens=15, ignore_eos=True)
    expected = generate_tokens(llm, [[7, 8]], free)
    for fields, num_tokens, words in wishes:
        params = SamplingParams(
            seed=0, temperature=temperature, max_tokens=20, ignore_eos=True, logprobs=2, **fields
        )
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            outputs = generate(llm, [[1, 2, 3], [7, 8]], [params, free])
        for sample in outputs[0].outputs:
            assert (sample.finish_reason, sample.stop_reason) == ("error", None), fields
            assert words in str(sample.error)
            assert len(sample.token_ids) == len(sample.logprobs) == num_tokens
            assert num_tokens == 0 or np.isfinite(sample.cumulative_logprob)
        assert tokens_of(outputs[1:]) == expected
        assert_idle(llm)


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_where_no_token_is_left_the_request_ends_with_an_error(llm, temperature):
    assert_dead_ends(llm, temperature, DEAD_ENDS)


@pytest.mark.nightly
@pytest.mark.parametrize("options", [EXACT, {"async_scheduling": False}])
def test_where_no_token_is_left_in_other_engines(folder, head, options):
    wishes = DEAD_ENDS[: 3 if "exact" in options else None]
    with make_llm(folder, "eagle3", head, **options) as llm:
        for temperature in 1.0, 0.0:
            assert_dead_ends(llm, temperature, wishes)
