"""The parameters of Tunix's actors become the engine's, whatever class they are of."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from support.engines import VOCAB
from support.tunix_stub import CONFIG, OPTIONS, Letters

from specjax.device.models.registry import load_model
from specjax.rl.nnx import PolicyModule
from specjax.rl.tunix import TunixRollout

pytestmark = pytest.mark.usefixtures("simulated_device")


@pytest.fixture(scope="module")
def tied(checkpoints):
    """A target whose embeddings are its head, as the actor below has it, and one like it."""

    def make(seed):
        return checkpoints.target(vocab_size=VOCAB, tie_word_embeddings=True, seed=seed)

    return make(0), make(5)


class Llama3(nnx.Module):
    """Parameters under the names and in the shapes of Tunix's class, with an adapter on q."""

    def __init__(self, folder, *, rank=0):
        from safetensors.numpy import load_file

        def node(**children):
            module = nnx.Module()
            for name, child in children.items():
                setattr(module, name, child)
            return module

        x = load_file(folder / "model.safetensors")

        def param(name, *shape):
            array = x[name].T.reshape(shape) if shape else x[name]
            return nnx.Param(jnp.asarray(array))

        def layer(name):
            attention, mlp = f"{name}.self_attn", f"{name}.mlp"
            projections = {
                "q_proj": node(w=param(f"{attention}.q_proj.weight", 32, 4, 8)),
                "k_proj": node(w=param(f"{attention}.k_proj.weight", 32, 2, 8)),
                "v_proj": node(w=param(f"{attention}.v_proj.weight", 32, 2, 8)),
                "o_proj": node(w=param(f"{attention}.o_proj.weight", 4, 8, 32)),
            }
            if rank:
                rng = np.random.default_rng(int(name.rpartition(".")[2]))
                q = projections["q_proj"]
                q.w_lora_a = nnx.LoRAParam(jnp.asarray(rng.normal(size=(32, rank)), jnp.float32))
                q.w_lora_b = nnx.LoRAParam(jnp.asarray(rng.normal(size=(rank, 4, 8)), jnp.float32))
            return node(
                attn=node(**projections),
                mlp=node(
                    gate_proj=node(kernel=param(f"{mlp}.gate_proj.weight", 32, 48)),
                    up_proj=node(kernel=param(f"{mlp}.up_proj.weight", 32, 48)),
                    down_proj=node(kernel=param(f"{mlp}.down_proj.weight", 48, 32)),
                ),
                input_layernorm=node(w=param(f"{name}.input_layernorm.weight")),
                post_attention_layernorm=node(w=param(f"{name}.post_attention_layernorm.weight")),
            )

        self.embedder = node(input_embedding=param("model.embed_tokens.weight"))
        self.layers = nnx.List([layer(f"model.layers.{i}") for i in range(2)])
        self.final_norm = node(w=param("model.norm.weight"))


def test_tunixs_models_are_known_by_their_class(tied):
    target, other = tied
    made = TunixRollout(
        Llama3(other.folder), Letters(), None, CONFIG, model=target.folder, **OPTIONS
    )
    _, params = load_model(other.folder, np.dtype("float32"))
    with made.engine:
        jax.tree.map(np.testing.assert_array_equal, made.engine.params.target, params)


def test_adapters_are_merged_at_every_update(tied):
    target, _ = tied
    actor = Llama3(target.folder, rank=2)
    with pytest.raises(ValueError, match="pass lora_scale=alpha / rank"):
        TunixRollout(actor, Letters(), None, CONFIG, model=target.folder, **OPTIONS)
    made = TunixRollout(
        actor, Letters(), None, CONFIG, model=target.folder, lora_scale=0.25, **OPTIONS
    )
    with made.engine:
        q = actor.layers[1].attn.q_proj
        q.w_lora_a[...] = q.w_lora_a[...] * 3
        made.update_params(nnx.state(actor, nnx.LoRAParam), (nnx.LoRAParam,))
        delta = np.einsum("dr,rnh->dnh", q.w_lora_a[...], q.w_lora_b[...])
        expected = (np.asarray(q.w[...]) + 0.25 * delta).reshape(32, 32)
        found = made.engine.params.target.layers[1].attention.qkv.values[:, :32]
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_the_actors_other_variables_are_left_out(target):
    class Actor(PolicyModule):
        def __init__(self, *given):
            super().__init__(*given)
            self.dropout = nnx.Dropout(0.1, rngs=nnx.Rngs(0))

    actor = Actor(*load_model(target.folder, np.dtype("float32")))
    made = TunixRollout(actor, Letters(), None, CONFIG, model=target.folder, **OPTIONS)
    with made.engine:
        made.update_params(nnx.state(actor))
        assert made.engine.version == 2


def test_an_actor_in_the_hosts_memory_is_refused(target):
    actor = PolicyModule(*load_model(target.folder, np.dtype("float32")))
    host = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
    nnx.update(actor, jax.device_put(nnx.state(actor), host))
    with pytest.raises(ValueError, match="set offload_to_cpu=False"):
        TunixRollout(actor, Letters(), None, CONFIG, model=target.folder)


def test_an_actor_that_does_not_fit_is_refused_at_construction(checkpoints, target):
    other = checkpoints.target(vocab_size=VOCAB, hidden_size=16)
    actor = PolicyModule(*load_model(other.folder, np.dtype("float32")))
    with pytest.raises(ValueError, match="wrong shape"):
        TunixRollout(actor, Letters(), None, CONFIG, model=target.folder, **OPTIONS)
