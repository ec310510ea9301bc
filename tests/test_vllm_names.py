"""vLLM's names that specjax lacks are accepted if their values match, and refused otherwise."""

import warnings

import pytest
import transformers
from support.engines import simulated_engines
from support.refusals import refusal
from support.scripts import TextScript
from support.texts import VOCAB

from specjax import LLM, AsyncLLM, SamplingParams, SpeculativeConfig, StructuredOutputs
from specjax.checkpoint.demo import demo_folder
from specjax.text.tokenizer import load_tokenizer
from specjax.vllm_names import PAGE, SAMPLING, SPECULATION, STRUCTURED, without_draft_size

NGRAM = {"method": "ngram", "num_speculative_tokens": 3}
TABLES = {
    "sampling": (lambda **given: SamplingParams(**given), SAMPLING, {}),
    "structured": (lambda **given: StructuredOutputs(**given), STRUCTURED, {"regex": "a"}),
    "speculation": (lambda **given: SpeculativeConfig.of(given), SPECULATION, NGRAM),
}


@pytest.mark.parametrize("kind", TABLES)
def test_values_that_mean_what_is_done_are_taken_and_others_name_the_page(kind):
    make, table, given = TABLES[kind]
    plain = make(**given)
    for name, (values, _) in table.items():
        for value in values or ():
            assert make(**given, **{name: value}) == plain, name
        if values is None:
            with pytest.warns(UserWarning, match=f"{name}='else'.*no effect") as told:
                assert make(**given, **{name: "else"}) == plain
            assert told[0].filename == __file__
        else:
            refusal(lambda name=name: make(**given, **{name: "else"}), f"{name}='else'", PAGE)


RENAMED = [
    ({"method": "dspark", "model": "x"}, {"method": "dflash"}),
    ({"method": "qwen3_5_mtp"}, {"method": "mtp"}),
    ({"method": "eagle3", "model": "x", "parallel_drafting": True}, {"method": "p_eagle"}),
    ({"method": "ngram", "rejection_sample_method": "block"}, {"verification": "block"}),
]


@pytest.mark.parametrize("given, fields", RENAMED, ids=str)
def test_methods_by_vllms_names(given, fields):
    config = SpeculativeConfig.of({"num_speculative_tokens": 3} | given)
    assert {name: getattr(config, name) for name in fields} == fields


def test_unknown_fields_name_the_nearest():
    for name, end in ("temprature", "; did you mean 'temperature'\\?"), ("wholly_other", ""):
        with pytest.raises(TypeError, match=f"no field '{name}'{end}$"):
            SamplingParams(**{name: 1})


def test_methods_that_are_not_here_name_the_page(letters):
    with simulated_engines(TextScript(VOCAB)):
        with LLM(letters, verbose=False) as llm:
            for name in "beam_search", "encode", "llm_engine", "collective_rpc":
                with pytest.raises(AttributeError, match=f"no attribute '{name}': .*see {PAGE}"):
                    getattr(llm, name)
            with pytest.raises(AttributeError, match="no attribute 'nothing'$"):
                getattr(llm, "nothing")  # noqa: B009
        with pytest.raises(AttributeError, match=PAGE):
            getattr(AsyncLLM, "__new__")(AsyncLLM).encode  # noqa: B009, B018


def test_warnings_are_at_the_callers_line(letters):
    with simulated_engines(TextScript(VOCAB)), warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        LLM(letters, verbose=False, **{"enforce_eager": True}).close()
        SpeculativeConfig.of(NGRAM | {"num_speculative_tokens": 20})
        many = NGRAM | {"num_speculative_tokens": 20}
        LLM(letters, verbose=False, speculative_config=many).close()
    assert len(told) == 3 and {one.filename for one in told} == {__file__}


def test_the_tokenizer_answers_as_transformers():
    origin = demo_folder("demo-llama")
    ours, theirs = load_tokenizer(origin), transformers.AutoTokenizer.from_pretrained(origin)
    assert ours is not None
    for text in "Tom has 3 eggs.", ["a", "", "bc d"]:
        expected = theirs(text)
        assert {**ours(text)} == {name: expected[name] for name in ("input_ids", "attention_mask")}
        assert ours(text).input_ids == expected.input_ids
        bare = ours(text, add_special_tokens=False, padding=False, return_tensors=None)
        assert bare["input_ids"] == theirs(text, add_special_tokens=False)["input_ids"]
    for name in (
        *("vocab_size", "eos_token", "eos_token_id", "bos_token_id", "pad_token_id", "unk_token"),
        *("all_special_ids", "all_special_tokens"),
    ):
        assert getattr(ours, name) == getattr(theirs, name), name
    assert len(ours) == len(theirs) and ours.get_vocab() == theirs.get_vocab()
    ids = theirs("Tom has 3 eggs.")["input_ids"]
    tokens = theirs.convert_ids_to_tokens(ids)
    assert ours.convert_ids_to_tokens(ids) == tokens
    assert ours.convert_ids_to_tokens(ids[0]) == tokens[0]
    assert ours.convert_tokens_to_ids(tokens) == ids
    skip = {"skip_special_tokens": True}
    assert ours.batch_decode([ids, ids[:2]], **skip) == theirs.batch_decode([ids, ids[:2]], **skip)
    refusal(lambda: ours("a", return_tensors="pt"), "return_tensors='pt'", "leave it out")
    with pytest.raises(AttributeError):
        _ = ours.nothing  # pyright: ignore[reportAttributeAccessIssue]


def test_a_drafters_number_of_devices_may_be_that_of_its_target():
    given = {"method": "ngram", "draft_tensor_parallel_size": 2, "x": [2]}
    assert without_draft_size(given, 2) == {"method": "ngram", "x": [2]}
    assert without_draft_size(given, 4) == given and without_draft_size(None, 2) is None
    with pytest.raises(ValueError, match="divided over devices like its target"):
        SpeculativeConfig.of({**without_draft_size(given, 1), "num_speculative_tokens": 3})
