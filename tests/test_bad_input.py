"""Invalid parameters are refused before anything runs; errors name parameter and value."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.engines import make_llm
from support.refusals import label, refusal
from support.texts import simulated_llm, with_bytes

from specjax import SamplingParams, StructuredOutputs
from specjax.config import EngineConfig
from specjax.sampling_params import (
    MAX_BAD_WORD_TOKENS,
    MAX_BAD_WORDS,
    MAX_LOGIT_BIAS,
    MAX_SAMPLES,
    MAX_STOP_IDS,
)
from specjax.text.prompts import RequestMaker
from specjax.text.tokenizer import load_tokenizer

VOCAB = 96
MAX_LEN = 64
EOS = 5
PROMPT = [1, 2, 3]
nan, inf = math.nan, math.inf


@pytest.fixture(scope="module")
def target(checkpoints):
    return checkpoints.target("llama", tie_word_embeddings=True, eos_token_id=EOS)


@pytest.fixture(scope="module")
def text_folder(checkpoints, target):
    """A tiny target with a tokenizer of single bytes."""
    return with_bytes(checkpoints, target.folder)


@pytest.fixture(scope="module")
def llm(checkpoints, target, text_folder):
    """An LLM on a simulated device: requests are refused before the device is used."""
    sizes = {"max_model_len": MAX_LEN, "max_num_seqs": 2, "max_num_batched_tokens": 16}
    sizes |= {"decode_batches": None, "prefill_shapes": None}
    head = checkpoints.eagle(target).folder
    with simulated_llm(text_folder, "eagle", model=head, k=2, **sizes) as llm:
        yield llm


@pytest.fixture(scope="module")
def real(text_folder):
    """An LLM on the real device, which applies the options that change logits."""
    with make_llm(text_folder, "ngram") as llm:
        yield llm


@pytest.fixture
def is_unharmed(llm):
    """After each test, check that nothing is queued, and that outputs are as before."""

    def outputs():
        params = SamplingParams(temperature=0.9, seed=3, max_tokens=8, ignore_eos=True)
        done = llm.generate([PROMPT, [4] * 20], params, use_tqdm=False)
        return [output.outputs[0].token_ids for output in done]

    expected, before = outputs(), llm.metrics()
    yield
    assert not llm.engine.has_work
    assert dataclasses.replace(llm.metrics(), host_gap_ms=before.host_gap_ms) == before
    assert outputs() == expected
    assert llm.engine.scheduler.pages.num_free == llm.engine.scheduler.pages.num_pages
    assert llm.metrics().num_compiles_after_warmup == before.num_compiles_after_warmup


# --- sampling parameters --------------------------------------------------------------------------

NO_COUNT = [1.5, 2.0, True, np.True_, "2", nan, inf, np.array([1, 2])]
NO_NUMBER = ["1", b"1", None, True, np.True_, nan, inf, 1j, object, 10**400, [0.5], np.ones(2)]
NO_SWITCH = ["no", "", None, 2, np.array([1, 2])]
BAD_FIELDS = {
    "n": [0, -1, None, MAX_SAMPLES + 1, 10**30, *NO_COUNT],
    "temperature": [-0.5, -1e-9, 1e39, *NO_NUMBER],
    "top_p": [0, 0.0, -0.1, 1.01, *NO_NUMBER],
    "top_k": [-2, None, *NO_COUNT],
    "min_p": [-0.1, 1.1, np.float32(nan), *NO_NUMBER],
    "seed": [-(2**63) - 1, 2**64, *NO_COUNT],
    "max_tokens": [0, -3, *NO_COUNT],
    "min_tokens": [-1, 17, None, *NO_COUNT],  # max_tokens=16
    "repetition_penalty": [0, -1, 1e39, 1e-39, *NO_NUMBER],
    "presence_penalty": [-2.1, 2.1, -inf, -(10**400), *NO_NUMBER],
    "frequency_penalty": [-2.1, 2.1, -inf, -(10**400), *NO_NUMBER],
    "logprobs": [-2, *NO_COUNT],
    "prompt_logprobs": [-2, *NO_COUNT],
    "truncate_prompt_tokens": [0, -2, 1.0, True, np.True_, "3", np.array([1, 2])],
    "ignore_eos": NO_SWITCH,
    "detokenize": NO_SWITCH,
    "include_stop_str_in_output": NO_SWITCH,
    "skip_special_tokens": NO_SWITCH,
    "spaces_between_special_tokens": NO_SWITCH,
    "output_kind": [None, 1, "DELTA"],
    "allowed_token_ids": ["12", 5],
    "stop_token_ids": ["12", 5],
    "stop": [5],
    "bad_words": ["word", 5],
    "logits_processors": [5, jnp.tanh],
    "logit_bias": [5, "ab"],
    "structured_outputs": ["{}", 5],
}


@pytest.mark.parametrize("name", BAD_FIELDS)
def test_a_field_out_of_range(name):
    for value in BAD_FIELDS[name]:
        refusal(lambda value=value: SamplingParams(**{name: value}), f"{name}={value!r}")


DEEP = "[" * 100_000
NO_IDS = [-1], [1.0], ["1"], [True]
NO_TEXTS = [""], ["a", ""], [5], [b"a"], [None]
BAD_MEMBERS = [  # of texts, lists and mappings
    *(("allowed_token_ids", value, "") for value in ([], *NO_IDS)),
    *(("stop_token_ids", value, "") for value in NO_IDS),
    ("stop_token_ids", range(MAX_STOP_IDS + 1), MAX_STOP_IDS + 1),
    *(("stop", value, "not empty") for value in ("", *NO_TEXTS)),
    *(("bad_words", value, "not empty") for value in NO_TEXTS),
    *((name, ["a", "\udc00"], "surrogate") for name in ("stop", "bad_words")),
    *(("logits_processors", [value], "not a function") for value in ("relu", None, 5)),
    *(("logit_bias", {key: 0.0}, "token id") for key in (-1, 1.0, "1", True)),
    *(("logit_bias", {1: x}, "[1]=") for x in (inf, -inf, nan, 1e39, 10**400, "2", None, True)),
    *(("logit_bias", value, "mapping") for value in ([1, 2], [(1, 2.0)])),
    ("logit_bias", dict.fromkeys(range(MAX_LOGIT_BIAS + 1), 1.0), MAX_LOGIT_BIAS + 1),
    *(("structured_outputs", value, "mapping") for value in ([], ["json"])),
    *(("structured_outputs", value, "exactly one") for value in ({}, {"json": None})),
    ("structured_outputs", {"json": {}, "regex": "a"}, "'json', 'regex'"),
    *(("structured_outputs", value, "unknown") for value in ({"a": {}}, {1: {}}, {1: {}, "a": 5})),
    *(("structured_outputs", {"json": value}, ".json") for value in ("{", "", 5, True, [])),
    *(("structured_outputs", {name: DEEP}, f".{name}") for name in ("json", "structural_tag")),
    *(("structured_outputs", {"regex": value}, ".regex") for value in ("", 5, b"a")),
    *(("structured_outputs", {"grammar": value}, ".grammar") for value in ("", 5)),
    *(("structured_outputs", {"choice": v}, ".choice") for v in ("ab", [], [""], ["a", 5], 5, {})),
]


def test_a_member_of_another_form():
    for name, value, word in BAD_MEMBERS:
        refusal(lambda value=value, name=name: SamplingParams(**{name: value}), name, word)
    apart = {"skip_special_tokens": False, "spaces_between_special_tokens": False}
    for fields in {"stop": "a", "detokenize": False}, apart:
        refusal(lambda fields=fields: SamplingParams(**fields), *fields)
    for fields in {"json": "{"}, {}, {"json": {}, "choice": ["a"]}:
        refusal(lambda fields=fields: StructuredOutputs(**fields), "structured_outputs")


NUMBERS = {"n": 2, "seed": 2**32 - 1, "max_tokens": 9, "min_tokens": 2, "top_k": 20}
NUMBERS |= {"temperature": 0.75, "top_p": 0.5, "min_p": 0.125, "repetition_penalty": 1.25}
NUMBERS |= {"presence_penalty": -2.0, "frequency_penalty": 2.0, "logit_bias": {7: 1.5, 9: -2.0}}
NUMBERS |= {"allowed_token_ids": [*range(6, 90)], "stop_token_ids": [8, 11]}


def as_numpy(value):
    if isinstance(value, dict):
        return {np.int64(key): np.float32(x) for key, x in value.items()}
    if isinstance(value, list):
        return np.array(value)
    return np.float32(value) if isinstance(value, float) else np.int64(value)


@pytest.mark.parametrize(
    "which, logprobs", [("real", {}), ("llm", {"logprobs": 2, "prompt_logprobs": 1})]
)
def test_numpy_numbers_are_numbers(request, which, logprobs):
    llm, numbers = request.getfixturevalue(which), NUMBERS | logprobs
    params = [
        SamplingParams(**numbers),
        SamplingParams(**{name: as_numpy(value) for name, value in numbers.items()}),
        SamplingParams(**numbers | {"temperature": np.float64(0.75), "seed": np.uint32(2**32 - 1)}),
    ]
    outputs = llm.generate([PROMPT] * 3, params, use_tqdm=False)
    first, *others = [dataclasses.replace(output, request_id=0) for output in outputs]
    assert all(other == first for other in others)
    assert len(first.outputs) == 2
    assert (first.outputs[0].logprobs is not None) == bool(logprobs)


# --- parameters and the model ---------------------------------------------------------------------


def raising(tokens, length, logits):
    raise RuntimeError("it is broken")


def not_to_be_batched(tokens, length, logits):
    shape = jax.ShapeDtypeStruct(logits.shape, logits.dtype)
    return jax.pure_callback(lambda x: x, shape, logits)


@dataclasses.dataclass
class Unhashable:
    scale: float

    def __call__(self, tokens, length, logits):
        return logits * self.scale


BAD_PROCESSORS = [
    (lambda tokens, length, logits: logits[:-1], "float32[96]"),
    (lambda tokens, length, logits: logits.astype(jnp.int32), "float32[96]"),
    (lambda tokens, length, logits: None, "None"),
    (lambda tokens, length, logits: (logits, logits), "lambda"),
    (lambda tokens, length, logits: logits if length > 3 else -logits, "lambda"),
    (lambda tokens, logits: logits, "(tokens i32[L]"),
    (raising, "it is broken"),
    (not_to_be_batched, "not_to_be_batched"),
    (Unhashable(2.0), "hash"),
]
FORCED = {"allowed_token_ids": [EOS, 9], "stop_token_ids": [9], "min_tokens": 2}
BAD_REQUESTS = [
    ({"max_tokens": None, "min_tokens": MAX_LEN - 2}, ["min_tokens=62", "max_model_len=64", "61"]),
    ({"max_tokens": 100, "min_tokens": 62}, ["min_tokens=62", "max_model_len=64", "61"]),
    ({"max_tokens": None, "min_tokens": 2**40}, ["min_tokens=", "max_model_len=64"]),
    *(({"logit_bias": {token: 1.0}}, ["logit_bias", token, VOCAB]) for token in (VOCAB, 2**40)),
    ({"allowed_token_ids": [3, VOCAB]}, ["allowed_token_ids", f"token id {VOCAB}"]),
    ({"stop_token_ids": [2**40]}, ["stop_token_ids", f"token id {2**40}"]),
    ({"stop_token_ids": range(10, 10 + MAX_STOP_IDS)}, ["stop_token_ids", MAX_STOP_IDS + 1]),
    *(({"logprobs": n}, [f"logprobs={n}", "max_logprobs=20"]) for n in (21, -1)),
    *(({"prompt_logprobs": n}, [f"prompt_logprobs={n}", "max_logprobs=20"]) for n in (21, -1)),
    ({"bad_words": ["a" * (MAX_BAD_WORD_TOKENS + 1)]}, ["bad_words", "aaaaaaaaa"]),
    ({"bad_words": [chr(65 + i) for i in range(MAX_BAD_WORDS + 1)]}, ["bad_words", 33]),
    ({"bad_words": ["ﷺ"]}, ["bad_words", "no tokens"]),
    ({"allowed_token_ids": [EOS], "min_tokens": 2}, ["allowed_token_ids", "min_tokens=2"]),
    (FORCED, ["allowed_token_ids"]),
    ({"allowed_token_ids": [3, 4], "bad_words": ["$", "%"]}, ["allowed_token_ids", "bad_words"]),
    *(({"logits_processors": [f]}, ["logits_processors", word]) for f, word in BAD_PROCESSORS),
]


def as_grammar(kind, value, *words, **fields):
    """Return parameters with a wrong grammar, and the expected words of the error.

    With `fields`, the grammar is only wrong together with these parameters.
    """
    where = "structured_outputs" if fields else f"structured_outputs.{kind}"
    return {"structured_outputs": {kind: value}} | fields, [where, *words]


YES_NO = "choice", ["yes", "no"]
BAD_GRAMMARS = [
    as_grammar("json", {"type": "thing"}, "thing"),
    as_grammar("regex", "(a", "(a"),
    as_grammar("choice", ["ﷺ" * 3]),
    as_grammar("grammar", "start: ("),
    # Dead ends: other parameters rule out what the grammar allows.
    as_grammar(*YES_NO, "min_tokens=4", min_tokens=4),
    as_grammar(*YES_NO, "min_tokens=4", min_tokens=4, ignore_eos=True),
    as_grammar(*YES_NO, "allowed_token_ids", allowed_token_ids=[5, 6]),
    as_grammar(*YES_NO, "bad_words", bad_words=["y", "n"]),
    as_grammar("regex", "a{0}", "min_tokens=1", min_tokens=1),
]


@pytest.mark.parametrize("fields, words", BAD_REQUESTS + BAD_GRAMMARS, ids=label)
@pytest.mark.usefixtures("is_unharmed")
def test_one_bad_request_leaves_nothing_queued(llm, fields, words):
    if "structured_outputs" in fields:
        pytest.importorskip("llguidance")
    good = SamplingParams(temperature=0, max_tokens=4)
    bad = SamplingParams(**{"temperature": 1.0, "seed": 1} | fields)
    do = lambda: llm.generate([PROMPT] * 4, [good, good, bad, good], use_tqdm=False)  # noqa: E731
    refusal(do, "prompt 2", *words)


def test_a_step_that_fails_to_compile_spoils_no_other_request(real):
    """A logits processor passes the first check and fails later: only its own request fails."""

    def fickle(tokens, length, logits):
        if is_broken:
            raise RuntimeError("it broke later")
        return logits

    before = real.metrics().num_compiles_after_warmup
    is_broken = False
    bad = SamplingParams(logits_processors=[fickle])
    request = real.request_maker.make(PROMPT, bad, 10**6, "prompt 0")
    is_broken = True
    with pytest.raises(RuntimeError, match="broke later"):
        real.engine.prepare([request])
    assert real.generate(PROMPT, SamplingParams(max_tokens=4), use_tqdm=False)[0].finished
    assert real.metrics().num_compiles_after_warmup == before


@pytest.mark.parametrize(
    "fields, word",
    [
        ({"stop": "a"}, "tokenizer"),
        ({"bad_words": ["a"]}, "tokenizer"),
        ({"structured_outputs": {"choice": ["a"]}}, "tokenizer"),
        ({"prompt_logprobs": 0}, "exact=True"),
        ({"logits_processors": [lambda tokens, length, logits: logits / 2]}, "exact=True"),
    ],
    ids=label,
)
def test_what_cannot_be_done_without_a_tokenizer_or_in_exact_mode(text_folder, fields, word):
    is_exact = word == "exact=True"
    tokenizer = load_tokenizer(text_folder) if is_exact else None
    config = EngineConfig(max_model_len=MAX_LEN, num_pages=8, exact=is_exact)
    maker = RequestMaker(config, tokenizer, VOCAB, (EOS,), lambda processors: 0)
    refusal(lambda: maker.make(PROMPT, SamplingParams(**fields), 0, "it"), *fields, word)
    others = {"stop": "a"} if is_exact else {}
    assert maker.make(PROMPT, SamplingParams(logprobs=3, top_k=2, **others), 0, "it")


def test_extremes_that_are_allowed(real):
    """The smallest and largest allowed values give numbers, not NaN, and likely tokens."""
    base = {"temperature": 1.0, "seed": 5, "max_tokens": 12, "ignore_eos": True}

    def tokens(**fields):
        params = SamplingParams(**base | fields)
        return real.generate(PROMPT, params, use_tqdm=False)[0].outputs[0].token_ids

    plain, greedy = tokens(), tokens(temperature=0)
    sharp = [{"temperature": x} for x in (1e-60, 1e-30, 1e-3)]
    for fields in *sharp, {"top_k": 1}, {"top_p": 1e-30}, {"top_p": 1e-60}, {"min_p": 1.0}:
        assert tokens(**fields) == greedy, fields
    for fields in (
        *({"top_k": 2**40}, {"top_k": -1}, {"top_p": 1.0}, {"top_p": 1 - 1e-12}, {"min_p": 1e-60}),
        *({"max_tokens": None}, {"max_tokens": 2**40}, {"allowed_token_ids": range(VOCAB)}),
        {"logit_bias": {token: 1000.0 for token in range(VOCAB)}},
    ):
        assert tokens(**fields)[:12] == plain, fields
    assert set(tokens(logit_bias={7: 1e30})) == {7}
    assert 7 not in tokens(logit_bias={7: -1e30}, temperature=3.0)
    assert set(tokens(temperature=1e30)) <= set(range(VOCAB))
    assert len(set(tokens(repetition_penalty=1e30, temperature=0))) > 1
    assert len(set(tokens(repetition_penalty=1e-30, temperature=0))) >= 1
