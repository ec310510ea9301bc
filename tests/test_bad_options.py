"""Options of an LLM of another type or range are refused by name, value and remedy; simulated."""

import math

import numpy as np
import pytest
from support.engines import SIZES
from support.refusals import label, refusal
from support.scripts import TextScript
from support.texts import VOCAB, letters_folder, simulated_llm

from specjax import SamplingParams, SpeculativeConfig


@pytest.fixture(scope="module")
def folder(checkpoints):
    return letters_folder(checkpoints)


FLAGS = "enable_prefix_caching", "async_scheduling", "exact", "verbose"
COUNTS = (
    *("max_model_len", "max_num_seqs", "max_num_batched_tokens", "max_num_scheduled_tokens"),
    *("page_size", "num_pages", "num_snapshots", "max_logprobs"),
)
BAD_OPTIONS = [
    *((name, value, ["True or False"]) for name in FLAGS for value in ("no", 1, None)),
    *((name, value, ["integer"]) for name in COUNTS for value in ("4", 4.0, True, -1, math.nan)),
    *(("seed", value, ["integer of 64 bits"]) for value in (True, "1", None, 1.0)),
    *(
        ("gpu_memory_utilization", value, ["(0, 1]", "GPU's memory"])
        for value in ("0.9", None, True, 90, math.nan, -0.5)
    ),
    *(("tensor_parallel_size", value, ["use 1"]) for value in ("1", 2, 0, None)),
    *(("compilation_cache", value, ["folder's path", "None"]) for value in (5, True, ["a"])),
    *(("logprobs_mode", value, ["raw, processed"]) for value in (["raw"], 5)),
    *(("dtype", value, ["auto, float32"]) for value in (None, 5, np.float32, "fp8")),
    *(("kernels", value, ["auto, reference"]) for value in (None, True)),
    *(("scheduling_policy", value, ["fcfs, priority"]) for value in (None, "lifo")),
    *(("decode_batches", value, ["decode_batches"]) for value in (4, "4", (4.0,), (0, 4))),
    *(("prefill_shapes", value, ["prefill_shapes"]) for value in (5, "ab", ((2.0, 32),))),
]


@pytest.mark.parametrize(
    "name, value, words",
    [pytest.param(*one, id=f"{one[0]}-{label(one[1])}") for one in BAD_OPTIONS],
)
def test_an_option_out_of_range(folder, name, value, words):
    shown = [name] if isinstance(value, tuple | str) else [f"{name}={value!r}"]
    refusal(lambda: simulated_llm(folder, **{name: value}), *shown, *words)


@pytest.mark.parametrize(
    "fields, words",
    [
        ({"prompt_lookup_max": 0}, ["prompt_lookup_max=0", "at least 1"]),
        ({"prompt_lookup_min": 0}, ["prompt_lookup_min=0", "at least 1"]),
        ({"prompt_lookup_max": "3"}, ["prompt_lookup_max='3'", "integer"]),
        ({"prompt_lookup_min": 4, "prompt_lookup_max": 2}, ["_min=4", "_max=2", "lower"]),
        ({"model": "folder"}, ["model='folder'", "leave it out"]),
    ],
    ids=label,
)
def test_prompt_lookup_out_of_range(folder, fields, words):
    refusal(lambda: simulated_llm(folder, "ngram", speculation=fields), *words)


@pytest.mark.parametrize("model", [None, 5, b"demo-llama", ["demo-llama"]], ids=label)
def test_a_model_of_another_type(model):
    refusal(lambda: simulated_llm(model), f"model={model!r}", "folder, hub id or demo", "params")


def test_a_missing_field_of_speculation_is_to_be_added():
    words = "speculative_config lacks", "num_speculative_tokens", "add"
    refusal(lambda: SpeculativeConfig.of({"method": "ngram"}), *words)


def test_numpy_numbers_are_options(folder):
    sizes = {name: np.int64(size) for name, size in SIZES.items() if type(size) is int}
    numbers = {"seed": np.uint32(3), "gpu_memory_utilization": np.float32(0.5)}
    params = SamplingParams(temperature=1.0, max_tokens=5)
    outputs = []
    for options in {**sizes, **numbers}, {"seed": 3, "gpu_memory_utilization": 0.5}:
        with simulated_llm(folder, script=TextScript(VOCAB), **options) as llm:
            outputs.append(llm.generate([1, 2], params)[0].outputs[0].token_ids)
    assert outputs[0] == outputs[1]
