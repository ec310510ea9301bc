"""Every family: weights with Hugging Face names, and exports, compared with transformers."""

from dataclasses import replace

import jax
import numpy as np
import pytest
from support.engines import SIZES, VOCAB, K
from support.logits import hf_logits
from support.params import random_params
from support.rollouts import PROMPTS

from specjax import SamplingParams
from specjax.checkpoint.save import save_checkpoint
from specjax.device.models.registry import MODELS, load_model
from specjax.device.models.text_config import WRAPPERS
from specjax.rl import RolloutEngine, save_model
from specjax.rl.named import read_named
from specjax.rl.weights import stage_target
from specjax.train.data import Document
from specjax.train.drafter import KINDS, HeadSizes
from specjax.train.target import init_params

transformers = pytest.importorskip("transformers")
torch = pytest.importorskip("torch")

FLOAT32 = np.dtype(np.float32)
CONFIGS = {
    "mistral": {"sliding_window": 10},
    "ministral": {
        "head_dim": 8,
        "sliding_window": 10,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "ministral3": {
        "head_dim": 8,
        "rope_parameters": {
            **{"rope_type": "yarn", "rope_theta": 300.0, "factor": 4.0},
            **{"original_max_position_embeddings": 16, "llama_4_scaling_beta": 0.3},
        },
    },
    "qwen2": {"tie_word_embeddings": True},
    "mistral3": {"sliding_window": None},
    "glm4_moe": {"use_qk_norm": True},
}


def two_targets(checkpoints, kind):
    """Return two checkpoints of the same model that differ in every weight."""
    return (
        checkpoints.target(kind, seed=seed, vocab_size=VOCAB, **CONFIGS.get(kind, {}))
        for seed in (0, 5)
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*MODELS, *WRAPPERS])
def test_updates_and_exports(checkpoints, kind, tmp_path):
    """An update with another checkpoint's tensors gives the same weights as loading it.

    transformers reads the exported weights as that checkpoint.
    """
    one, two = two_targets(checkpoints, kind)
    model, params = load_model(one.folder, FLOAT32)
    named = read_named(two.hf.state_dict(), params, "weights")
    sources, sharding = stage_target(named, model, params), jax.tree.leaves(params)[0].sharding
    updated = jax.tree.unflatten(
        jax.tree.structure(params),
        [
            source.copy(leaf.dtype, sharding)
            for source, leaf in zip(sources, jax.tree.leaves(params), strict=True)
        ],
    )
    jax.tree.map(np.testing.assert_array_equal, updated, load_model(two.folder, FLOAT32)[1])
    save_model(tmp_path, model, updated, one.folder)
    tokens = np.random.default_rng(0).integers(0, VOCAB, (1, 24))
    auto = transformers.AutoModelForCausalLM
    exported = auto.from_pretrained(tmp_path, attn_implementation="eager").eval()
    np.testing.assert_array_equal(hf_logits(exported, tokens), hf_logits(two.hf, tokens))


def write_new_head(kind, target, folder):
    """Write a new random head, as `specjax train` starts with."""
    model, _ = load_model(target, FLOAT32)
    sizes = HeadSizes(aux_layers=(0, 1), mask_token_id=0, num_heads=K, draft_vocab_size=16)
    start = KINDS[kind].make(model, sizes, [Document(np.arange(VOCAB), 0)])
    params = init_params(start.head.specs(), jax.random.key(0))
    extra = KINDS[kind].vocabulary(start.head, replace(params, **start.frozen))
    save_checkpoint(folder, start.head.specs(), params, start.config, dtype=FLOAT32, extra=extra)


@pytest.mark.parametrize(
    "kind, drafter",
    [
        pytest.param("gpt_oss", "dflash", marks=pytest.mark.slow),
        pytest.param("glm4_moe_lite", "eagle3", marks=pytest.mark.nightly),
        pytest.param("gemma3_text", "eagle3", marks=pytest.mark.nightly),
    ],
)
def test_new_heads_and_updates(checkpoints, kind, drafter, tmp_path):
    """With a new head, tokens are the target's, before and after an update."""
    one, two = two_targets(checkpoints, kind)
    write_new_head(drafter, one.folder, tmp_path)
    speculation = {"method": drafter, "model": str(tmp_path), "num_speculative_tokens": K}
    params = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
    with RolloutEngine(one.folder, speculative_config=speculation, **SIZES) as engine:
        for target in one, two:
            if target is two:
                engine.update_weights(target.hf.state_dict())
            for prompt, rollout in zip(PROMPTS, engine.generate(PROMPTS, params), strict=True):
                output = rollout.token_ids.tolist()
                logits = hf_logits(target.hf, [[*prompt, *output]])[0, len(prompt) - 1 : -1]
                assert output == logits.argmax(-1).tolist()
        assert engine.metrics().num_accepted_tokens > 0


def test_only_a_models_own_checkpoint_is_its_source(checkpoints, tmp_path):
    model, _ = load_model(checkpoints.target("llama", vocab_size=VOCAB).folder, FLOAT32)
    other = checkpoints.target("qwen3", vocab_size=VOCAB).folder
    with pytest.raises(ValueError, match="not the checkpoint of the model"):
        save_model(tmp_path, model, random_params(model.specs(), 0), other)
