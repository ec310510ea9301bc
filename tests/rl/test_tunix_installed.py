"""The adapter together with Tunix itself, if Tunix is installed.

To install: pip install --no-deps google-tunix jaxtyping wadler-lindig immutabledict
"""

import importlib
import importlib.util
import sys
import warnings
from dataclasses import fields
from types import ModuleType

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from support.engines import VOCAB
from support.tunix_stub import CONFIG, Letters, made

from specjax.rl import tunix as adapter
from specjax.rl.tunix import RolloutOutput, TunixRollout

KINDS = [
    ("llama3", "Llama3", "llama"),
    pytest.param("qwen2", "Qwen2", "qwen2", marks=pytest.mark.slow),
    ("qwen3", "Qwen3", "qwen3"),
]


@pytest.fixture
def tunix():
    """Tunix's own base_rollout. The package around it is a stub, because it imports much more."""
    spec = importlib.util.find_spec("tunix")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("google-tunix is not installed")
    stand_in = ModuleType("tunix")
    stand_in.__path__ = list(spec.submodule_search_locations)
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Tunix's own code
        patch.setitem(sys.modules, "tunix", stand_in)
        patch.setattr(adapter, "_tunix", importlib.import_module("tunix.rl.rollout.base_rollout"))
        adapter._register()
        yield adapter._tunix
    for name in [name for name in sys.modules if name.partition(".")[0] == "tunix"]:
        del sys.modules[name]


@pytest.fixture
def promotes():
    """Allow JAX's default promotion of dtypes and ranks, which Tunix's models need."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def test_tunix_takes_it_for_one_of_its_own(tunix, target):
    assert issubclass(TunixRollout, tunix.BaseRollout)
    config = tunix.RolloutConfig(max_tokens_to_generate=5, max_prompt_length=8)
    rollout = made(target, config)
    with rollout.engine:
        abstract = tunix.BaseRollout.__abstractmethods__
        assert all(callable(getattr(rollout, name)) for name in abstract)
        assert isinstance(rollout.generate(["a", "b"], config), tunix.RolloutOutput)
    ours, theirs = fields(RolloutOutput), fields(tunix.RolloutOutput)
    assert [one.name for one in ours] == [one.name for one in theirs]
    with pytest.raises(ValueError, match="rollout_vllm_model_version='x'"):
        made(target, tunix.RolloutConfig(rollout_vllm_model_version="x"))


def tunix_actor(files, module, name):
    """Return Tunix's model with random parameters, in the sizes of a tiny checkpoint."""
    models = importlib.import_module(f"tunix.models.{module}.model")
    sizes = dict(num_layers=2, embed_dim=32, hidden_dim=48, num_heads=4, num_kv_heads=2, head_dim=8)
    config = models.ModelConfig(
        **sizes, vocab_size=VOCAB, rope_theta=1_000_000, norm_eps=files.hf.config.rms_norm_eps
    )
    actor = getattr(models, name)(config, rngs=nnx.Rngs(0))
    rng = np.random.default_rng(0)

    def noise(x):
        return jnp.asarray(0.3 * rng.normal(size=x.shape) + (x.ndim == 1), jnp.float32)

    nnx.update(actor, jax.tree.map(noise, nnx.state(actor, nnx.Param)))
    return actor


# Tunix's Llama3 (0.1.7) rotates by this base, whatever its config says.
ROPE = {"rope_type": "default", "rope_theta": 1e6}


@pytest.mark.usefixtures("promotes")
@pytest.mark.parametrize("module, name, kind", KINDS)
def test_rollouts_of_tunixs_models_have_their_logprobs(tunix, checkpoints, module, name, kind):
    files = checkpoints.target(kind, vocab_size=VOCAB, head_dim=8, rope_parameters=ROPE)
    actor = tunix_actor(files, module, name)
    rollout = made(files, rollout_actor=actor)
    with rollout.engine:
        ids, output = Letters().encode("real"), rollout.generate(["real"], CONFIG)
    tokens = jnp.array([[*ids, *output.tokens[0].tolist()]])
    length = tokens.shape[1]
    mask = jnp.tril(jnp.ones((1, length, length), bool))
    logits, _ = actor(tokens, jnp.arange(length)[None], None, mask)
    logps = jax.nn.log_softmax(logits[0, len(ids) - 1 : -1] / CONFIG.temperature)
    chosen = jnp.take_along_axis(logps, tokens[0, len(ids) :, None], axis=1)[:, 0]
    np.testing.assert_allclose(output.logprobs[0], chosen, atol=1e-3)
