"""Frequencies and factors of scaled rotations, as a config has them, against transformers.

What attention makes of them is compared in tests/oracle/test_models.py.
"""

import jax.numpy as jnp
import numpy as np
import pytest
from support.targets import CONFIG_SIZES

from specjax.device.models.hf_config import HFConfig
from specjax.device.models.registry import describe_model

ORIGINAL = {"original_max_position_embeddings": 4096}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 40.0, **ORIGINAL}
CASES = {
    "llama3": {
        **{"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, **ORIGINAL},
        **{"low_freq_factor": 1.0, "high_freq_factor": 4.0},
    },
    "yarn": YARN,
    "yarn-deepseek": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.707, "beta_fast": 16},
    "yarn-one-mscale": {**YARN, "mscale": 0.707, "beta_slow": 2},
    "yarn-not-truncated": {**YARN, "rope_theta": 150000.0, "factor": 32.0, "truncate": False},
    "yarn-attention-factor": {**YARN, "attention_factor": 1.5, "rope_theta": 1e6},
    "yarn-of-the-whole-length": {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0},
    "yarn-factor-below-one": {**YARN, "factor": 0.5},
    "yarn-ramp-of-no-width": {**YARN, "rope_theta": 1e30},
}
# The original length outside of `rope_parameters`, where it counts before the one inside.
OUTSIDE = {"yarn": {"original_max_position_embeddings": 1024}, "llama3": ORIGINAL}


@pytest.mark.parametrize("dim", [64, 10])
@pytest.mark.parametrize("name, outside", [*((n, {}) for n in CASES), *OUTSIDE.items()], ids=str)
def test_scaled_rotations(name, outside, dim):
    transformers = pytest.importorskip("transformers")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    fields = CASES[name]
    length = {"max_position_embeddings": 2048, **outside}
    config = transformers.LlamaConfig(head_dim=dim, rope_parameters=dict(fields), **length)
    expected, factor = ROPE_INIT_FUNCTIONS[fields["rope_type"]](config)
    rope = HFConfig({"rope_parameters": fields, **length}, "config.json").rope(dim)
    np.testing.assert_allclose(rope.inverse_frequencies(), expected.numpy(), rtol=2e-6)
    assert rope.attention_factor == pytest.approx(factor, rel=1e-6)
    cos, sin = rope.angles(jnp.arange(3)).rotation
    np.testing.assert_allclose(cos**2 + sin**2, factor**2, rtol=1e-5)


QWEN3 = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
LENGTHS = [  # as vLLM derives them, or what `max_position_embeddings` says if that is more
    (40960, QWEN3, 131072),
    (131072, QWEN3, 131072),
    (262144, QWEN3, 262144),
    (40960, {"type": "yarn", "factor": 4.0}, 163840),
    (4096, {"type": "linear", "factor": 8.0}, 32768),
    (131072, CASES["llama3"], 131072),
    (4096, {"rope_type": "default"}, 4096),
]


@pytest.mark.parametrize("where", ["rope_parameters", "rope_scaling"])
@pytest.mark.parametrize("length, rope, longest", LENGTHS)
def test_how_many_positions_a_scaled_model_has(length, rope, longest, where):
    fields = {**CONFIG_SIZES, "max_position_embeddings": length, where: rope}
    for kind in "qwen3", "llama":
        hf = HFConfig({"model_type": kind, **fields}, "config.json")
        assert describe_model(hf).max_position == longest
