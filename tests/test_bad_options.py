"""Invalid options of an LLM are refused before any work; errors name option and value."""

import math

import numpy as np
import pytest
from support.engines import SIZES, make_llm
from support.refusals import label, refusal
from support.scripts import TextScript
from support.texts import VOCAB, simulated_llm

from specjax import LLM, SamplingParams
from specjax.device.models.registry import load_model

nan = math.nan


@pytest.fixture
def no_work(monkeypatch, compilations):
    """Check that no weights are read, and that nothing is compiled."""
    monkeypatch.setattr(
        "specjax.serving.assembly.load_weights", lambda *_: pytest.fail("weights were read")
    )
    with compilations.none_expected():
        yield


NO_COUNT = ["4", 4.0, True, -1, nan]
BAD_OPTIONS = {
    **dict.fromkeys(("enable_prefix_caching", "async_scheduling", "exact"), ["no", 1, None]),
    "verbose": ["no", 1, None],
    "max_model_len": [0, 513, *NO_COUNT],  # of 512
    **dict.fromkeys(("max_num_seqs", "max_num_batched_tokens"), [0, *NO_COUNT]),
    "page_size": [0, 257, 10**18, 10**30, *NO_COUNT],  # max_model_len=128
    **dict.fromkeys(("max_num_scheduled_tokens", "num_pages"), [0, *NO_COUNT]),
    **dict.fromkeys(("num_snapshots", "max_logprobs"), NO_COUNT),
    "seed": [True, "1", None, 1.0, -(2**63) - 1, 2**64],
    "gpu_memory_utilization": ["0.9", None, True, 90, nan, -0.5, 0.0, 1.1],
    "tensor_parallel_size": ["1", 5, 0, None, True],
    "data_parallel_size": ["2", 2.0, 5, 0, True, None],
    "compilation_cache": [5, True, ["a"], ""],
    "quantization": [["fp8"], {"fp8": 1}, "awq", 8, True],
    "collectives": [None, 1, "ring"],
    "logprobs_mode": [["raw"], 5, "cooked", None],
    "dtype": [None, 5, np.float32, "fp8", "half", "float16", "bf16", ["float32"]],
    "kernels": [None, True, "cuda"],
    "scheduling_policy": [None, "lifo"],
}


@pytest.mark.parametrize("name", BAD_OPTIONS)
@pytest.mark.usefixtures("no_work")
def test_an_option_out_of_range(letters, name):
    for value in BAD_OPTIONS[name]:
        do = lambda value=value: make_llm(letters, **{name: value})  # noqa: E731
        refusal(do, f"{name}={value!r}")


FEW = {"max_num_seqs": 6, "max_num_batched_tokens": 24, "decode_batches": (6,)}
SMALL = {"prefill_shapes": ((1, 8),)}
NGRAM = {"method": "ngram", "num_speculative_tokens": 2}
SUFFIX = NGRAM | {"method": "suffix"}
BAD_SUFFIX = {
    "max_tree_depth": (0, 1, 2.5, 257),
    "max_cached_requests": (-1, "3", 10**400),
    "max_spec_factor": (0, "1", 1001, nan, math.inf),
    "min_token_prob": (-0.1, 1.5, nan),
}
ZERO_D = np.array(4)  # an array without dimensions
NO_SIZES = 4, "4", (4.0,), (0, 4), (), ZERO_D
BAD_SETS = [
    *(({"decode_batches": sizes}, ["decode_batches"]) for sizes in NO_SIZES),
    *(({"prefill_shapes": x}, ["prefill_shapes"]) for x in (5, "ab", ((2.0, 32),), (24,), ZERO_D)),
    (FEW | {"decode_batches": (1, 4)}, ["decode_batches=(1, 4)", "max_num_seqs=6", "add 6"]),
    (FEW | {"decode_batches": (1, 4)}, ["max_num_seqs to 4"]),
    (FEW | SMALL, ["prefill_shapes=((1, 8),)", "add (3, 8)", "max_num_batched_tokens=24", "to 8"]),
    (FEW | {"prefill_shapes": ((1, 8), (2, 10))}, ["20 tokens of the 24", "add (3, 10)"]),
    *(
        (FEW | {"decode_batches": (6, size)}, [f"decode_batches[1]={size}", "96", "max_num_seqs=6"])
        for size in (97, 10**9, 10**30)
    ),
    *(
        (FEW | {"prefill_shapes": ((1, 24), shape)}, [f"prefill_shapes[1]={shape}", "384", "24"])
        for shape in ((5, 77), (1, 10**12), (10**30, 1))
    ),
    ({"num_pages": 3, "page_size": 16}, ["num_pages=3", "max_model_len=128", "8 pages"]),
    ({"speculative_config": {}}, ["lacks"]),
    ({"speculative_config": NGRAM | {"model": "a"}}, ["model='a'"]),
    ({"speculative_config": NGRAM | {"method": "eagle", "model": "no/such"}}, ["no/such"]),
    *(
        ({"speculative_config": NGRAM | {f"prompt_lookup_{end}": value}}, [f"_{end}={value!r}"])
        for end, value in (("max", 0), ("min", 0), ("max", "3"), ("max", 65), ("min", 10**9))
    ),
    (
        {"speculative_config": NGRAM | {"prompt_lookup_min": 4, "prompt_lookup_max": 2}},
        ["_min=4", "_max=2"],
    ),
    *(
        ({"speculative_config": SUFFIX | {f"suffix_decoding_{name}": value}}, [f"{name}={value!r}"])
        for name, values in BAD_SUFFIX.items()
        for value in values
    ),
    *(
        ({"speculative_config": NGRAM | {"with": given}}, [f"with={given!r}", "a list of suffix"])
        for given in ("suffix", ["oracle"], ["suffix"] * 2, [["suffix"]], None)
    ),
    (
        {"speculative_config": NGRAM | {"sources": ["suffix"], "with": ["suffix"]}},
        ["with and sources", "leave one out"],
    ),
    ({"speculative_config": SUFFIX | {"with": ["suffix"]}}, ["must be left out"]),
    ({"speculative_config": SUFFIX | {"method": "sufix"}}, ["method='sufix'", "suffix"]),
    ({"speculative_config": SUFFIX | {"model": "a"}}, ["model='a'", "no checkpoint"]),
    (
        {"speculative_config": NGRAM | {"suffix_decoding_min_token_prob": 0.2}},
        ["suffix_decoding_min_token_prob", "method='suffix'", "'ngram'"],
    ),
]


@pytest.mark.parametrize("options, words", BAD_SETS, ids=label)
@pytest.mark.usefixtures("no_work")
def test_options_that_do_not_go_together(letters, options, words):
    refusal(lambda: LLM(letters, **SIZES | {"decode_batches": None} | options), *words)


@pytest.mark.parametrize("model", [None, 5, b"demo-llama", ["demo-llama"]], ids=label)
def test_a_model_of_another_type(model):
    refusal(lambda: simulated_llm(model), f"model={model!r}", "params")


def test_params_go_with_a_model_value(letters):
    model, params = load_model(letters, np.dtype(np.float32))
    refusal(lambda: LLM(model), "params")
    refusal(lambda: LLM(letters, params=params), "params")


def test_numpy_numbers_are_options(letters):
    sizes = {name: np.int64(size) for name, size in SIZES.items() if type(size) is int}
    numbers = {"seed": np.uint32(3), "gpu_memory_utilization": np.float32(0.5)}
    params = SamplingParams(temperature=1.0, max_tokens=5)
    outputs = []
    for options in {**sizes, **numbers}, {"seed": 3, "gpu_memory_utilization": 0.5}:
        with simulated_llm(letters, script=TextScript(VOCAB), **options) as llm:
            outputs.append(llm.generate([1, 2], params)[0].outputs[0].token_ids)
    assert outputs[0] == outputs[1]
