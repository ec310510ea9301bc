"""Engines with interpreted GPU kernels give the tokens of engines in plain JAX."""

import pytest
from support.engines import generate, make_llm, tokens_of

from specjax import SamplingParams

pytestmark = [pytest.mark.nightly, pytest.mark.usefixtures("small_test")]

SIZES = {"head_dim": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 48}
LLAMA = {"num_hidden_layers": 2}
DELTA = {"linear_key_head_dim": 16, "linear_value_head_dim": 32}
DRAWN = {"temperature": 0.8, "top_p": 0.9, "top_k": 12, "min_p": 0.02}
PROMPTS = [[5, 9, 2, 7, 7, 1, 3, 30, 11], [8, 8, 12]]
ASKED = [
    SamplingParams(max_tokens=9, temperature=0, ignore_eos=True),
    SamplingParams(max_tokens=7, seed=3, ignore_eos=True, logprobs=0, **DRAWN),
]


@pytest.fixture(scope="module")
def models(checkpoints):
    """The folder and the drafter of two models: attention with EAGLE-3; a hybrid MoE with MTP."""
    llama = checkpoints.target("llama", **SIZES, **LLAMA)
    eagle = checkpoints.eagle3(llama, draft_vocab=40, head_dim=64, num_aux=2)
    qwen = checkpoints.mtp(checkpoints.target("qwen3_5_moe", **SIZES, **DELTA))
    return {
        "llama": (llama.folder, "eagle3", eagle.folder),
        "qwen3_5_moe": (qwen.folder, "mtp"),
    }


@pytest.mark.parametrize("kind", ["llama", "qwen3_5_moe"])
def test_tokens_are_those_of_plain_jax(models, kind):
    """The engines have few shapes and one variant, so that little is compiled."""
    sizes = {"max_model_len": 64, "max_num_seqs": 1, "max_num_batched_tokens": 16, "num_pages": 10}
    sizes |= {"page_size": 16, "decode_batches": None, "prefill_shapes": None}
    outputs = []
    for kernels in "reference", "interpret":
        options = sizes | {"kernels": kernels, "enable_prefix_caching": False}
        with make_llm(*models[kind], k=2, compile_ahead=False, **options) as llm:
            outputs.append(generate(llm, PROMPTS, ASKED))
    plain, fast = outputs
    assert tokens_of(fast) == tokens_of(plain)
    logprobs = [found[1].outputs[0].cumulative_logprob for found in outputs]
    assert logprobs[0] == pytest.approx(logprobs[1], abs=1e-4)
