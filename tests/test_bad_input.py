"""What cannot be served is refused by name, value and remedy, before anything runs."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.engines import make_llm
from support.refusals import label, refusal
from support.texts import simulated_llm, with_bytes

from specjax import LLM, SamplingParams, StructuredOutputs
from specjax.config import EngineConfig
from specjax.sampling_params import (
    MAX_BAD_WORD_TOKENS,
    MAX_BAD_WORDS,
    MAX_LOGIT_BIAS,
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
    """On a simulated device: whatever is refused is so before a device is asked."""
    head = checkpoints.eagle(target).folder
    sizes = {
        "max_model_len": MAX_LEN,
        "max_num_seqs": 2,
        "max_num_batched_tokens": 16,
        "decode_batches": None,
        "prefill_shapes": None,
    }
    with simulated_llm(text_folder, "eagle", model=head, k=2, **sizes) as llm:
        yield llm


@pytest.fixture(scope="module")
def real(text_folder):
    """What requests ask of logits only a real device knows."""
    with make_llm(text_folder, "ngram") as llm:
        yield llm


@pytest.fixture
def is_unharmed(llm):
    """After a test, nothing is queued, and the same request has the same output as before."""

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

BAD_FIELDS = [
    ("n", [0, -1, 1.5, 2.0, True, "2", None, nan], ["at least 1"]),
    ("temperature", [-0.5, -1e-9, nan, inf, "1", None, True, [1.0], 1e39], ["0 means greedy"]),
    ("top_p", [0, 0.0, -0.1, 1.1, nan, inf, "0.5", None, True, 1.01], ["(0, 1]", "1 keeps all"]),
    ("top_k", [-2, 1.5, 3.0, True, "3", None, nan, inf], ["-1", "keeps all"]),
    ("min_p", [-0.1, 1.1, nan, inf, "0", None, True], ["[0, 1]", "0 keeps all"]),
    ("seed", [-(2**63) - 1, 2**64, 1.0, True, "1", nan], [f"{-(2**63)}..{2**64 - 1}", "None"]),
    ("max_tokens", [0, -3, 2.0, True, "9", inf], ["at least 1", "None"]),
    ("min_tokens", [-1, 2.0, True, "1", None], ["at least 0"]),
    ("min_tokens", [17], ["max_tokens=16"]),
    (
        "repetition_penalty",
        [0, -1, nan, inf, "1", None, True, 1e39, 1e-39],
        ["[1e-30", "1 is none"],
    ),
    ("presence_penalty", [-2.1, 2.1, 3, nan, inf, -inf, "0", None, True], ["-2", "2", "0 is none"]),
    (
        "frequency_penalty",
        [-2.1, 2.1, 3, nan, inf, -inf, "0", None, True],
        ["-2", "2", "0 is none"],
    ),
    ("logprobs", [-2, 1.0, True, "5", nan], ["at least -1", "None"]),
    ("prompt_logprobs", [-2, 1.0, True, "5"], ["at least -1", "None"]),
    ("logit_bias", [{-1: 0.0}, {1.0: 0.0}, {"1": 0.0}, {True: 1.0}], ["token id"]),
    ("logit_bias", [{1: x} for x in (inf, -inf, nan, 1e39)], ["[1]=", "1e+30", "allowed_token"]),
    ("logit_bias", [{1: "2"}, {1: None}, {1: True}], ["[1]=", "number"]),
    ("logit_bias", [5, "ab", [1, 2], [(1, 2.0)]], ["mapping"]),
    (
        "logit_bias",
        [dict.fromkeys(range(MAX_LOGIT_BIAS + 1), 1.0)],
        [MAX_LOGIT_BIAS + 1, "at most"],
    ),
    ("allowed_token_ids", [[]], ["empty", "None allows all"]),
    ("allowed_token_ids", [[-1], [1.0], ["1"], [True], "12", 5], []),
    ("stop_token_ids", [[-1], [1.0], ["1"], [True], "12", 5], []),
    ("stop_token_ids", [range(MAX_STOP_IDS + 1)], [MAX_STOP_IDS + 1, f"at most {MAX_STOP_IDS}"]),
    ("stop", [[""], ["a", ""], [5], [b"a"], [None]], ["not empty"]),
    ("stop", [5], ["texts"]),
    ("stop", [["a", "\ud800"]], ["surrogate"]),
    ("bad_words", [["\udfffa"]], ["surrogate"]),
    ("bad_words", [[""], ["a", ""], [5], [b"a"]], ["not empty"]),
    ("bad_words", ["word", 5], ["texts"]),
    ("logits_processors", [["relu"], [None], [5]], ["not a function"]),
    ("logits_processors", [5, jnp.tanh], ["list"]),
    ("ignore_eos", ["no", None, 2], ["True or False"]),
    ("detokenize", ["no", None], ["True or False"]),
    ("include_stop_str_in_output", ["", None], ["True or False"]),
    ("skip_special_tokens", ["", None], ["True or False"]),
    ("spaces_between_special_tokens", ["", None], ["True or False"]),
    ("output_kind", [None, 1, "DELTA"], ["RequestOutputKind"]),
    ("truncate_prompt_tokens", [0, -2, 1.0, True, "3"], ["at least 1", "None all"]),
    ("structured_outputs", ["{}", 5, [], ["json"]], ["StructuredOutputs", "mapping"]),
    ("structured_outputs", [{}, {"json": None}], ["exactly one", "none"]),
    ("structured_outputs", [{"json": {}, "regex": "a"}], ["exactly one", "'json', 'regex'"]),
    ("structured_outputs", [{"schema": {}}, {1: {}}, {1: {}, "a": 5}], ["unknown keys", "regex"]),
    ("structured_outputs", [{"json": "{"}, {"json": ""}], ["structured_outputs.json", "not JSON"]),
    (
        "structured_outputs",
        [{"json": v} for v in (5, True, [])],
        ["structured_outputs.json", "schema"],
    ),
    ("structured_outputs", [{"regex": v} for v in ("", 5, b"a")], ["structured_outputs.regex"]),
    ("structured_outputs", [{"grammar": v} for v in ("", 5)], ["structured_outputs.grammar"]),
    (
        "structured_outputs",
        [{"choice": v} for v in ("ab", [], [""], ["a", 5], 5, {})],
        ["structured_outputs.choice"],
    ),
]


@pytest.mark.parametrize(
    "name, value, words",
    [
        pytest.param(name, value, words, id=f"{name}-{str(value)[:20]}")
        for name, values, words in BAD_FIELDS
        for value in values
    ],
)
def test_a_field_out_of_range(name, value, words):
    shown = [name] if isinstance(value, dict | list | range) else [name, f"{name}={value!r}"]
    refusal(lambda: SamplingParams(**{name: value}), *shown, *words)


def test_stop_texts_need_text():
    refusal(lambda: SamplingParams(stop="a", detokenize=False), "stop", "detokenize=True")
    refusal(lambda: SamplingParams(stop=""), "stop", "not empty")


@pytest.mark.parametrize("fields", [{"json": "{"}, {}, {"json": {}, "choice": ["a"]}], ids=label)
def test_structured_outputs_check_themselves(fields):
    refusal(lambda: StructuredOutputs(**fields), "structured_outputs")


NUMBERS = {
    "n": 2,
    "temperature": 0.75,
    "top_p": 0.5,
    "top_k": 20,
    "min_p": 0.125,
    "seed": 2**32 - 1,
    "max_tokens": 9,
    "min_tokens": 2,
    "repetition_penalty": 1.25,
    "presence_penalty": -2.0,
    "frequency_penalty": 2.0,
    "logit_bias": {7: 1.5, 9: -2.0},
    "allowed_token_ids": list(range(6, 90)),
    "stop_token_ids": [8, 11],
}


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


def with_wrong_shape(tokens, length, logits):
    return logits[:-1]


def with_wrong_type(tokens, length, logits):
    return logits.astype(jnp.int32)


def without_result(tokens, length, logits):
    return None


def with_two_results(tokens, length, logits):
    return logits, logits


def raising(tokens, length, logits):
    raise RuntimeError("it is broken")


def with_python_control(tokens, length, logits):
    return logits if length > 3 else -logits


def with_too_few_arguments(tokens, logits):
    return logits


def not_to_be_batched(tokens, length, logits):
    shape = jax.ShapeDtypeStruct(logits.shape, logits.dtype)
    return jax.pure_callback(lambda x: x, shape, logits)


@dataclasses.dataclass
class Unhashable:
    scale: float

    def __call__(self, tokens, length, logits):
        return logits * self.scale


BAD_REQUESTS = [
    ({"max_tokens": None, "min_tokens": MAX_LEN - 2}, ["min_tokens=62", "max_model_len=64", "61"]),
    ({"max_tokens": 100, "min_tokens": 62}, ["min_tokens=62", "max_model_len=64", "61"]),
    ({"max_tokens": None, "min_tokens": 2**40}, ["min_tokens=", "max_model_len=64"]),
    ({"logit_bias": {VOCAB: 1.0}}, ["logit_bias", f"token id {VOCAB}", f"vocabulary of {VOCAB}"]),
    ({"logit_bias": {2**40: 1.0}}, ["logit_bias", f"{2**40}", f"vocabulary of {VOCAB}"]),
    ({"allowed_token_ids": [3, VOCAB]}, ["allowed_token_ids", f"token id {VOCAB}", "vocabulary"]),
    ({"stop_token_ids": [2**40]}, ["stop_token_ids", f"token id {2**40}", "vocabulary"]),
    ({"stop_token_ids": range(10, 10 + MAX_STOP_IDS)}, ["stop_token_ids", "9", "at most 8"]),
    ({"logprobs": 21}, ["logprobs=21", "max_logprobs=20"]),
    ({"prompt_logprobs": 21}, ["prompt_logprobs=21", "max_logprobs=20"]),
    ({"bad_words": ["a" * (MAX_BAD_WORD_TOKENS + 1)]}, ["bad_words", "aaaaaaaaa", "at most 8"]),
    (
        {"bad_words": [chr(65 + i) for i in range(MAX_BAD_WORDS + 1)]},
        ["bad_words", "33", "at most 32"],
    ),
    ({"bad_words": ["ﷺ"]}, ["bad_words", "no tokens"]),
    ({"allowed_token_ids": [EOS], "min_tokens": 2}, ["allowed_token_ids", "min_tokens=2"]),
    (
        {"allowed_token_ids": [EOS, 9], "min_tokens": 2, "stop_token_ids": [9]},
        ["allowed_token_ids"],
    ),
    ({"allowed_token_ids": [3, 4], "bad_words": ["$", "%"]}, ["allowed_token_ids", "bad_words"]),
    (
        {"logits_processors": [with_wrong_shape]},
        ["logits_processors", "with_wrong_shape", "float32[96]"],
    ),
    (
        {"logits_processors": [with_wrong_type]},
        ["logits_processors", "with_wrong_type", "float32[96]"],
    ),
    ({"logits_processors": [without_result]}, ["logits_processors", "without_result", "None"]),
    ({"logits_processors": [with_two_results]}, ["logits_processors", "with_two_results"]),
    ({"logits_processors": [raising]}, ["logits_processors", "raising", "it is broken"]),
    ({"logits_processors": [with_python_control]}, ["logits_processors", "with_python_control"]),
    ({"logits_processors": [with_too_few_arguments]}, ["with_too_few_arguments", "(tokens i32[L]"]),
    ({"logits_processors": [not_to_be_batched]}, ["logits_processors", "not_to_be_batched"]),
    ({"logits_processors": [Unhashable(2.0)]}, ["logits_processors", "Unhashable", "hash"]),
]
BAD_GRAMMARS = [
    ({"json": {"type": "thing"}}, ["structured_outputs.json", "thing"]),
    ({"json": {"enum": []}}, ["structured_outputs.json"]),
    ({"json": "[1]"}, ["structured_outputs.json"]),
    ({"json": {"const": object()}}, ["structured_outputs.json"]),
    ({"json": {"type": "integer", "minimum": 5, "maximum": 4}}, ["structured_outputs.json"]),
    ({"regex": "(a"}, ["structured_outputs.regex", "(a"]),
    ({"regex": "a(?=b)"}, ["structured_outputs.regex", "look-around"]),
    ({"regex": "[^\\x00-\\x{10FFFF}]"}, ["structured_outputs.regex"]),
    ({"choice": ["ﷺ" * 3]}, ["structured_outputs.choice"]),
    ({"grammar": "start: ("}, ["structured_outputs.grammar"]),
    ({"grammar": "other: /a/"}, ["structured_outputs.grammar", "start"]),
]
CHOICE = {"structured_outputs": {"choice": ["yes", "no"]}}
DEAD_ENDS = [  # grammars, and other parameters that rule out what they allow
    (CHOICE | {"min_tokens": 4}, ["structured_outputs.choice", "3 tokens", "min_tokens=4"]),
    (CHOICE | {"min_tokens": 4, "ignore_eos": True}, ["structured_outputs.choice", "min_tokens=4"]),
    (CHOICE | {"allowed_token_ids": [5, 6]}, ["structured_outputs", "allowed_token_ids"]),
    (CHOICE | {"bad_words": ["y", "n"]}, ["structured_outputs", "bad_words"]),
    (
        {"structured_outputs": {"regex": "a{0}"}, "min_tokens": 1},
        ["structured_outputs", "min_tokens=1"],
    ),
]


@pytest.mark.parametrize("fields, words", BAD_REQUESTS, ids=label)
@pytest.mark.usefixtures("is_unharmed")
def test_one_bad_request_leaves_nothing_queued(llm, fields, words):
    good = SamplingParams(temperature=0, max_tokens=4)
    bad = SamplingParams(**{"temperature": 1.0, "seed": 1} | fields)
    do = lambda: llm.generate([PROMPT] * 4, [good, good, bad, good], use_tqdm=False)  # noqa: E731
    refusal(do, "prompt 2", *words)


@pytest.mark.parametrize(
    "fields, words",
    [*(({"structured_outputs": one}, words) for one, words in BAD_GRAMMARS), *DEAD_ENDS],
    ids=label,
)
@pytest.mark.usefixtures("is_unharmed")
def test_a_grammar_that_cannot_be_followed(llm, fields, words):
    pytest.importorskip("llguidance")
    bad = SamplingParams(**fields)
    refusal(lambda: llm.generate([PROMPT, [1]], bad, use_tqdm=False), "prompt 0", *words)


@pytest.mark.parametrize(
    "params", [{"temperature": 0}, [{"temperature": 0}], ["x"], [None], 5, "x"], ids=label
)
@pytest.mark.usefixtures("is_unharmed")
def test_sampling_params_of_another_type(llm, params):
    refusal(lambda: llm.generate([PROMPT], params, use_tqdm=False), "SamplingParams")


@pytest.mark.usefixtures("is_unharmed")
def test_booleans_are_no_token_ids(llm):
    refusal(lambda: llm.generate([[True, False, 3]], use_tqdm=False), "prompt 0", "integers")


@pytest.mark.parametrize("prompts", [None, 5, 1.5], ids=label)
@pytest.mark.usefixtures("is_unharmed")
def test_no_prompts_at_all(llm, prompts):
    refusal(lambda: llm.generate(prompts, use_tqdm=False), f"prompts={prompts}", "token ids")


@pytest.mark.usefixtures("is_unharmed")
def test_half_a_character_in_a_prompt(llm):
    refusal(lambda: llm.generate(["a", "b\ud83d"], use_tqdm=False), "prompt 1", "surrogate")


@pytest.mark.parametrize(
    "talk", ["hi", ["hi"], [["hi"]], None, 5, {"role": "user"}, [[]]], ids=label
)
@pytest.mark.usefixtures("is_unharmed")
def test_a_conversation_of_another_form(llm, talk, monkeypatch):
    template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    tokenizer = dataclasses.replace(llm.tokenizer, template=template)
    monkeypatch.setattr(llm, "tokenizer", tokenizer)
    refusal(lambda: llm.chat(talk, SamplingParams(max_tokens=1), use_tqdm=False))


def test_a_step_that_fails_to_compile_spoils_no_other_request(real):
    """Whatever the check of a processor did not see, it is only its own request's fault."""

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
    good = SamplingParams(temperature=1.0, seed=1, top_k=5, max_tokens=4)
    assert real.generate(PROMPT, good, use_tqdm=False)[0].outputs[0].token_ids
    assert real.metrics().num_compiles_after_warmup == before


def test_texts_without_a_tokenizer(text_folder):
    maker = make_maker(None)
    for fields in (
        {"stop": "a"},
        {"bad_words": ["a"]},
        {"structured_outputs": {"choice": ["a"]}},
    ):
        params = SamplingParams(**fields)
        name = next(iter(fields))
        refusal(lambda params=params: maker.make(PROMPT, params, 0, "it"), name, "tokenizer")


def make_maker(tokenizer, **config):
    config = EngineConfig(max_model_len=MAX_LEN, num_pages=8, **config)
    return RequestMaker(config, tokenizer, VOCAB, (EOS,), lambda processors: 0)


def halve(tokens, length, logits):
    return logits / 2


@pytest.mark.parametrize(
    "fields", [{"prompt_logprobs": 0}, {"logits_processors": [halve]}], ids=label
)
def test_what_exact_mode_cannot_do(text_folder, fields):
    maker = make_maker(load_tokenizer(text_folder), exact=True)
    params, name = SamplingParams(**fields), next(iter(fields))
    refusal(lambda: maker.make(PROMPT, params, 0, "it"), name, "exact=True", "exact=False")
    assert maker.make(PROMPT, SamplingParams(logprobs=3, top_k=2, stop="a"), 0, "it")


def test_extremes_that_are_allowed(real):
    """The least and the most of each range leave numbers, not NaN: outputs have likely tokens."""
    base = {"temperature": 1.0, "seed": 5, "max_tokens": 12, "ignore_eos": True}

    def tokens(**fields):
        params = SamplingParams(**base | fields)
        return real.generate(PROMPT, params, use_tqdm=False)[0].outputs[0].token_ids

    plain, greedy = tokens(), tokens(temperature=0)
    for fields in (
        {"top_k": 1},
        {"top_p": 1e-30},
        {"top_p": 1e-60},
        {"min_p": 1.0},
        {"temperature": 1e-30},
        {"temperature": 1e-60},
        {"temperature": 1e-3},
    ):
        assert tokens(**fields) == greedy, fields
    for fields in (
        {"top_k": 2**40},
        {"top_k": -1},
        {"top_p": 1.0},
        {"top_p": 1 - 1e-12},
        {"min_p": 1e-60},
        {"max_tokens": None, "temperature": 1.0},
        {"max_tokens": 2**40},
        {"logit_bias": {token: 1000.0 for token in range(VOCAB)}},
        {"allowed_token_ids": range(VOCAB)},
    ):
        assert tokens(**fields)[:12] == plain, fields
    assert set(tokens(logit_bias={7: 1e30})) == {7}
    assert 7 not in tokens(logit_bias={7: -1e30}, temperature=3.0)
    assert set(tokens(temperature=1e30)) <= set(range(VOCAB))
    assert len(set(tokens(repetition_penalty=1e30, temperature=0))) > 1
    assert len(set(tokens(repetition_penalty=1e-30, temperature=0))) >= 1


# --- what the engine can report -------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings, words",
    [
        ({"max_logprobs": -1}, ["max_logprobs=-1"]),
        ({"max_logprobs": True}, ["max_logprobs=True"]),
        ({"max_logprobs": 2.0}, ["max_logprobs=2.0"]),
        ({"logprobs_mode": "cooked"}, ["logprobs_mode='cooked'", "raw, processed"]),
        ({"logprobs_mode": None}, ["logprobs_mode=", "None", "raw, processed"]),
    ],
    ids=label,
)
def test_bad_settings_of_logprobs(text_folder, settings, words, monkeypatch):
    def refuse(*_):
        raise AssertionError("weights were read before the error")

    monkeypatch.setattr("specjax.serving.assembly.load_weights", refuse)
    refusal(lambda: LLM(text_folder, max_model_len=MAX_LEN, verbose=False, **settings), *words)
