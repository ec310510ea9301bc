"""Flax nnx: training an engine's model, and converting other models' states to checkpoints."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from safetensors.numpy import load_file
from support.engines import VOCAB
from support.logits import hf_logits
from support.rollouts import SETTINGS, copied, log_softmax
from support.tunix_stub import tunix_tree

from specjax import SamplingParams
from specjax.device.models.registry import load_model
from specjax.rl.engine import RolloutEngine
from specjax.rl.nnx import ArrayRule, PolicyModule, from_heads, hf_named, transposed
from specjax.rl.tunix_names import LLAMA3, QWEN2, QWEN3, names_of


@nnx.jit
def logits_of(policy, tokens):
    return policy(tokens)


def load(files):
    return load_model(files.folder, np.dtype("float32"))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "qwen3", "qwen3_5"])
def test_a_policy_gives_the_logits_of_transformers(checkpoints, kind):
    files = checkpoints.target(kind, vocab_size=VOCAB)
    tokens = np.random.default_rng(0).integers(0, VOCAB, (2, 7))
    logits = logits_of(PolicyModule(*load(files)), jnp.asarray(tokens))
    assert logits.shape == (2, 7, VOCAB) and logits.dtype == jnp.float32
    np.testing.assert_allclose(logits, hf_logits(files.hf, tokens), atol=2e-4)


@pytest.mark.parametrize("kind, config", [("qwen2", {}), ("llama", {"tie_word_embeddings": True})])
def test_a_policy_has_the_paths_and_arrays_of_the_engine(checkpoints, kind, config):
    """The policy's arrays are copies, possibly of another dtype."""
    model, params = load(checkpoints.target(kind, vocab_size=VOCAB, **config))
    policy = PolicyModule(model, params)
    state = nnx.to_pure_dict(nnx.state(policy, nnx.Param))
    qkv = params.layers[0].attention.qkv.values
    assert state["layers"][0]["attention"]["qkv"].shape == qkv.shape
    assert len(jax.tree.leaves(state)) == len(jax.tree.leaves(params))
    assert ("lm_head" in state) == (params.lm_head is not None)
    jax.tree.map(np.testing.assert_array_equal, policy.params(), params)
    pairs = zip(jax.tree.leaves(policy.params()), jax.tree.leaves(params), strict=True)
    assert all(x.unsafe_buffer_pointer() != y.unsafe_buffer_pointer() for x, y in pairs)
    masters = PolicyModule(model, params, "bfloat16").params()
    assert {x.dtype for x in jax.tree.leaves(masters)} == {jnp.dtype("bfloat16")}


@pytest.mark.slow
def test_the_engine_generates_from_what_was_trained(target):
    with RolloutEngine(target.folder, **SETTINGS) as engine:
        policy = PolicyModule(engine.target, engine.params.target)
        optimizer = nnx.Optimizer(policy, optax.sgd(0.1), wrt=nnx.Param)
        tokens = jnp.asarray(np.random.default_rng(2).integers(0, VOCAB, (2, 9)))

        @nnx.jit(donate_argnums=(0, 1))
        def update(policy, optimizer):
            gradients = nnx.grad(lambda policy: jax.nn.logsumexp(policy(tokens)).sum())(policy)
            optimizer.update(policy, gradients)

        before = copied(engine.params.target)
        for _ in range(2):
            update(policy, optimizer)
            engine.update_weights(nnx.state(policy, nnx.Param))
        assert engine.version == 2
        unchanged = jax.tree.map(np.array_equal, engine.params.target, before)
        assert not any(jax.tree.leaves(unchanged))
        sampled = SamplingParams(n=2, temperature=0.7, max_tokens=6)
        rows = engine.generate([[1, 2, 3], [7, 2, 2, 8, 11]], sampled).padded(pad_id=0).joined()
        logps = log_softmax(np.asarray(logits_of(policy, rows.tokens[:, :-1])) / 0.7)
        chosen = np.take_along_axis(logps, rows.tokens[:, 1:, None], axis=-1)[..., 0]
        np.testing.assert_allclose(rows.logprobs[rows.mask], chosen[rows.mask], atol=1e-4)


@pytest.mark.parametrize("kind, names", [("llama", LLAMA3), ("qwen2", QWEN2), ("qwen3", QWEN3)])
def test_tunix_states_become_the_tensors_of_the_checkpoint(checkpoints, kind, names):
    folder = checkpoints.target(kind, vocab_size=VOCAB).folder
    # JAX lays arrays out by a program for each shape: one kind has JAX's.
    as_array = jnp.asarray if kind == "qwen3" else np.asarray
    state = jax.tree.map(lambda x: nnx.Param(as_array(x)), tunix_tree(folder))
    found = dict(hf_named(nnx.State(state), names))
    expected = load_file(folder / "model.safetensors")
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array, err_msg=name)


def test_several_axes_are_unrolled_in_the_order_of_the_name():
    array = np.arange(2 * 3 * 4 * 5).reshape(4, 3, 5, 2)  # [in, experts, out, layers]
    rule = ArrayRule("layers.#.experts.#.weight", transposed, stacked=(3, 1))
    found = dict(hf_named({"experts": array}, {"experts": rule}))
    assert len(found) == 6
    for layer in range(2):
        for expert in range(3):
            name = f"layers.{layer}.experts.{expert}.weight"
            np.testing.assert_array_equal(found[name], array[:, expert, :, layer].T)


def test_all_that_names_lack_or_have_too_much_is_listed():
    state = {"a": {"w": np.ones(2)}, "b": {"w": np.ones(2)}, "c": np.ones(2), "d": np.ones(2)}
    names = {"*.w": "*.weight", "a.*": "*.weight", "x.y": "z", "u": "v", "c": "same", "d.#": "q"}
    names["may.be"] = ArrayRule("absent", is_optional=True)
    with pytest.raises(ValueError) as raised:
        hf_named(state, names)
    text = str(raised.value)
    assert "paths without a rule: d;" in text
    assert "paths with several rules: a.w (*.w and a.*);" in text
    assert "rules without a path: x.y, u, d.#" in text
    assert "absent" not in text.partition("Give")[0]


Q = {"w": (6, 2, 4), "w_lora_a": (6, 3), "w_lora_b": (3, 2, 4)}  # a projection with adapters
REFUSED = [
    ({"a": 2, "b": 2, "c": 1}, {"a": "x", "b": "x", "c": "y"}, None, "paths of one name: a, b"),
    ({"a.w": 2}, {"*.w": "weight"}, None, r"another number of '\*' in the name: \*\.w"),
    (
        {"q": (4, 6)},
        {"q": ArrayRule("q.weight", from_heads)},
        *(None, r"q, of shape \[4, 6\], cannot be laid out as q.weight"),
    ),
    (Q, {"w": "q"}, None, r"w_lora_a.*pass lora_scale=alpha / rank"),
    ({"w_lora_a": (6, 3)}, {"w": "q"}, 1.0, "w_lora_a is without w and w_lora_b"),
]


@pytest.mark.parametrize("shapes, names, scale, message", REFUSED, ids=range(5))
def test_what_is_refused(shapes, names, scale, message):
    state = {path: np.ones(shape) for path, shape in shapes.items()}
    with pytest.raises(ValueError, match=message):
        dict(hf_named(state, names, lora_scale=scale))


def test_an_axis_without_a_mark_is_refused():
    with pytest.raises(ValueError, match="write one for each axis"):
        ArrayRule("layers.#.w")


def test_rules_are_found_by_the_class_of_a_model():
    class Qwen3:
        pass

    class Mine(Qwen3):
        pass

    assert names_of(Mine()) is QWEN3
    assert names_of(object()) is None
