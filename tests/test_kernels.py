"""Engines that run the GPU's kernels, interpreted, give the tokens of engines in plain JAX."""

import pytest

from specjax import LLM, SamplingParams

pytestmark = pytest.mark.slow

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
    """Folder and drafter by kind: attention, with EAGLE-3; a hybrid of experts, with its own."""
    llama = checkpoints.target("llama", **SIZES, **LLAMA)
    eagle = checkpoints.eagle3(llama, draft_vocab=40, head_dim=64, num_aux=2)
    qwen = checkpoints.mtp(checkpoints.target("qwen3_5_moe", **SIZES, **DELTA))
    return {
        "llama": (llama.folder, {"method": "eagle3", "model": str(eagle.folder)}),
        "qwen3_5_moe": (qwen.folder, {"method": "mtp"}),
    }


@pytest.mark.parametrize("kind", ["llama", "qwen3_5_moe"])
def test_tokens_are_those_of_plain_jax(models, kind):
    folder, speculation = models[kind]
    outputs = {}
    for kernels in "reference", "interpret":
        with LLM(
            str(folder),
            speculative_config={**speculation, "num_speculative_tokens": 2},
            dtype="float32",
            max_model_len=64,
            max_num_seqs=1,  # few shapes to compile, and one variant
            max_num_batched_tokens=16,
            num_pages=10,
            enable_prefix_caching=False,
            kernels=kernels,
            verbose=False,
        ) as llm:
            outputs[kernels] = llm.generate(PROMPTS, ASKED, use_tqdm=False)
    for plain, fast in zip(outputs["reference"], outputs["interpret"], strict=True):
        assert fast.outputs[0].token_ids == plain.outputs[0].token_ids
    logprobs = [out[1].outputs[0].cumulative_logprob for out in outputs.values()]
    assert logprobs[0] == pytest.approx(logprobs[1], abs=1e-4)
