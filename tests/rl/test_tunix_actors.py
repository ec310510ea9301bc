"""Parameters of Tunix's actors become the engine's, for every class of actor."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from support.engines import VOCAB
from support.tunix_stub import made, tunix_tree

from specjax.device.models.registry import load_model
from specjax.rl.nnx import PolicyModule

pytestmark = pytest.mark.usefixtures("simulated_device")


@pytest.fixture(scope="module")
def tied(checkpoints):
    """Two targets of the same sizes, whose output head is the embedding, as in the actor below."""

    def make(seed):
        return checkpoints.target(vocab_size=VOCAB, tie_word_embeddings=True, seed=seed)

    return make(0), make(5)


def load(files):
    return load_model(files.folder, np.dtype("float32"))


def nodes(tree):
    """Return nnx modules whose attributes are the parameters in `tree`."""
    if not isinstance(tree, dict):
        return nnx.Param(jnp.asarray(tree))
    if 0 in tree:
        return nnx.List([nodes(tree[i]) for i in range(len(tree))])
    module = nnx.Module()
    for name, child in tree.items():
        setattr(module, name, nodes(child))
    return module


class Llama3(nnx.Module):
    """A module with the parameter names and shapes of Tunix's class."""

    def __init__(self, folder):
        for name, child in tunix_tree(folder).items():
            setattr(self, name, nodes(child))

    def adapt(self, rank):
        """Add LoRA adapters to the query projections."""
        rng = np.random.default_rng(0)
        for layer in self.layers:
            q = layer.attn.q_proj
            q.w_lora_a = nnx.LoRAParam(jnp.asarray(rng.normal(size=(32, rank)), jnp.float32))
            q.w_lora_b = nnx.LoRAParam(jnp.asarray(rng.normal(size=(rank, 4, 8)), jnp.float32))


def test_tunixs_models_are_known_by_their_class(tied):
    target, other = tied
    with made(target, rollout_actor=Llama3(other.folder)).engine as engine:
        jax.tree.map(np.testing.assert_array_equal, engine.params.target, load(other)[1])


def test_adapters_are_merged_at_every_update(tied):
    target, _ = tied
    actor = Llama3(target.folder)
    actor.adapt(rank=2)
    with pytest.raises(ValueError, match="pass lora_scale=alpha / rank"):
        made(target, rollout_actor=actor)
    rollout = made(target, rollout_actor=actor, lora_scale=0.25)
    with rollout.engine:
        q = actor.layers[1].attn.q_proj
        q.w_lora_a[...] = q.w_lora_a[...] * 3
        rollout.update_params(nnx.state(actor, nnx.LoRAParam), (nnx.LoRAParam,))
        delta = np.einsum("dr,rnh->dnh", q.w_lora_a[...], q.w_lora_b[...])
        expected = (np.asarray(q.w[...]) + 0.25 * delta).reshape(32, 32)
        found = rollout.engine.params.target.layers[1].attention.qkv.values[:, :32]
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_the_actors_weights_come_without_its_other_variables(checkpoints, target):
    class Actor(PolicyModule):
        def __init__(self, *given):
            super().__init__(*given)
            self.dropout = nnx.Dropout(0.1, rngs=nnx.Rngs(0))

    other = load(checkpoints.target(vocab_size=VOCAB, seed=5))
    actor = Actor(*other)
    rollout = made(target, rollout_actor=actor)
    with rollout.engine as engine:
        rollout.update_params(nnx.state(actor))
        assert engine.version == 2
        jax.tree.map(np.testing.assert_array_equal, engine.params.target, other[1])


def test_actors_that_do_not_fit_are_refused_at_construction(checkpoints, target):
    actor = PolicyModule(*load(checkpoints.target(vocab_size=VOCAB, hidden_size=16)))
    with pytest.raises(ValueError, match="wrong shape"):
        made(target, rollout_actor=actor)
    host = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
    nnx.update(actor, jax.device_put(nnx.state(actor), host))
    with pytest.raises(ValueError, match="set offload_to_cpu=False"):
        made(target, rollout_actor=actor)
