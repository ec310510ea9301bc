import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from safetensors.numpy import load_file
from support.engines import VOCAB
from support.rollouts import SETTINGS, log_softmax

from specjax import SamplingParams
from specjax.device.models.registry import load_model
from specjax.rl.engine import RolloutEngine
from specjax.rl.nnx import ArrayRule, PolicyModule, from_heads, hf_named, to_heads, transposed
from specjax.rl.tunix_names import LLAMA3, QWEN2, QWEN3, names_of

HEADS, KV_HEADS, SIZE, DIM = 4, 2, 8, 32  # of the tiny checkpoints


@nnx.jit
def logits_of(policy, tokens):
    return policy(tokens)


def load(files):
    return load_model(files.folder, np.dtype("float32"))


def transformers_logits(files, tokens):
    import torch

    with torch.no_grad():
        return files.hf(torch.tensor(tokens)).logits.numpy()


@pytest.mark.parametrize("kind", ["llama", "qwen3", "qwen3_5"])
def test_a_policy_gives_the_logits_of_transformers(checkpoints, kind):
    files = checkpoints.target(kind, vocab_size=VOCAB)
    tokens = np.random.default_rng(0).integers(0, VOCAB, (2, 7))
    logits = logits_of(PolicyModule(*load(files)), jnp.asarray(tokens))
    assert logits.shape == (2, 7, VOCAB) and logits.dtype == jnp.float32
    np.testing.assert_allclose(logits, transformers_logits(files, tokens), atol=2e-4)


@pytest.mark.parametrize("kind, config", [("qwen2", {}), ("llama", {"tie_word_embeddings": True})])
def test_a_policys_state_has_the_paths_and_arrays_of_the_engine(checkpoints, kind, config):
    _, params = load(checkpoints.target(kind, vocab_size=VOCAB, **config))
    policy = PolicyModule(_, params)
    state = nnx.to_pure_dict(nnx.state(policy, nnx.Param))
    assert (
        state["layers"][0]["attention"]["qkv"].shape == params.layers[0].attention.qkv.values.shape
    )
    assert len(jax.tree.leaves(state)) == len(jax.tree.leaves(params))
    assert ("lm_head" in state) == (params.lm_head is not None)
    jax.tree.map(np.testing.assert_array_equal, policy.params(), params)


def test_a_policy_owns_its_arrays(target):
    model, params = load(target)
    policy = PolicyModule(model, params)
    ours = {x.unsafe_buffer_pointer() for x in jax.tree.leaves(policy.params())}
    assert ours.isdisjoint(x.unsafe_buffer_pointer() for x in jax.tree.leaves(params))


def test_a_policy_keeps_masters_in_another_type(target):
    model, params = load_model(target.folder, jnp.dtype("bfloat16"))
    assert {x.dtype for x in jax.tree.leaves(PolicyModule(model, params, "float32").params())} == {
        jnp.dtype("float32")
    }


def test_a_policy_learns_with_an_nnx_optimiser(target):
    model, params = load(target)
    policy = PolicyModule(model, params)
    optimizer = nnx.Optimizer(policy, optax.adam(3e-3), wrt=nnx.Param)
    tokens = jnp.asarray(np.random.default_rng(1).integers(0, VOCAB, (4, 12)))

    def loss(policy):
        each = optax.softmax_cross_entropy_with_integer_labels(
            policy(tokens)[:, :-1], tokens[:, 1:]
        )
        return each.mean()

    @nnx.jit
    def update(policy, optimizer):
        value, gradients = nnx.value_and_grad(loss)(policy)
        optimizer.update(policy, gradients)
        return value

    with jax.numpy_dtype_promotion("standard"):  # optax relies on it
        losses = [float(update(policy, optimizer)) for _ in range(20)]
    assert losses[-1] < 0.5 * losses[0]
    unchanged = jax.tree.map(np.array_equal, policy.params(), params)
    assert not any(jax.tree.leaves(unchanged))


def test_the_engine_generates_from_what_was_trained(target):
    with RolloutEngine(target.folder, **SETTINGS) as engine:
        policy = PolicyModule(engine.target, engine.params.target)
        optimizer = nnx.Optimizer(policy, optax.sgd(0.1), wrt=nnx.Param)
        tokens = jnp.asarray(np.random.default_rng(2).integers(0, VOCAB, (2, 9)))

        @nnx.jit(donate_argnums=(0, 1))
        def update(policy, optimizer):
            gradients = nnx.grad(lambda policy: jax.nn.logsumexp(policy(tokens)).sum())(policy)
            optimizer.update(policy, gradients)

        before = engine.checksum()
        for _ in range(2):
            update(policy, optimizer)
            engine.update_weights(nnx.state(policy, nnx.Param))
        assert engine.version == 2 and engine.checksum() != before
        sampled = SamplingParams(n=2, temperature=0.7, max_tokens=6)
        rows = engine.generate([[1, 2, 3], [7, 2, 2, 8, 11]], sampled).padded(pad_id=0).joined()
        logps = log_softmax(np.asarray(logits_of(policy, rows.tokens[:, :-1])) / 0.7)
        chosen = np.take_along_axis(logps, rows.tokens[:, 1:, None], axis=-1)[..., 0]
        np.testing.assert_allclose(rows.logprobs[rows.mask], chosen[rows.mask], atol=1e-4)


def tunix_state(folder, *, is_scanned=False, asarray=np.asarray):
    """A checkpoint's tensors in Tunix's names and shapes, written down independently of rules."""
    state = {}

    def put(path, array):
        node = state
        for key in path[:-1]:
            node = node.setdefault(key, {})
        node[path[-1]] = nnx.Param(asarray(array))

    tensors = load_file(folder / "model.safetensors")
    for name, x in tensors.items():
        if not (layer := re.match(r"model\.layers\.(\d+)\.(.*)", name)):
            path, array = {
                "model.embed_tokens.weight": (("embedder", "input_embedding"), x),
                "model.norm.weight": (("final_norm", "w"), x),
                "lm_head.weight": (("lm_head", "w"), x.T),
            }[name]
            put(path, array)
            continue
        number, rest = int(layer[1]), layer[2].split(".")
        match rest:
            case ["self_attn", "o_proj", "weight"]:
                path = "attn", "o_proj", "w"
                array = np.stack(np.split(x, HEADS, axis=1)).transpose(0, 2, 1)
            case ["self_attn", ("q_proj" | "k_proj" | "v_proj") as kind, "weight"]:
                path = "attn", kind, "w"
                array = np.stack(np.split(x, len(x) // SIZE)).transpose(2, 0, 1)
            case ["self_attn", kind, "bias"]:
                path, array = ("attn", f"{kind[0]}_bias"), x
            case ["self_attn", ("q_norm" | "k_norm") as kind, "weight"]:
                path, array = ("attn", kind, "w"), x
            case ["mlp", kind, "weight"]:
                path, array = ("mlp", kind, "kernel"), x.T
            case [kind, "weight"]:
                path, array = (kind, "w"), x
        put(("layers", number, *path), array)
    if is_scanned:
        layers = [state["layers"][i] for i in range(len(state["layers"]))]
        state["layers"] = jax.tree.map(lambda *xs: np.stack(xs, axis=1), *layers)
    return nnx.State(state)


TUNIX = [("llama", {}, LLAMA3), ("qwen2", {}, QWEN2), ("qwen3", {}, QWEN3)]
TUNIX += [("llama", {"tie_word_embeddings": True}, LLAMA3)]


@pytest.mark.parametrize("kind, config, names", TUNIX)
def test_tunix_states_become_the_tensors_of_the_checkpoint(checkpoints, kind, config, names):
    folder = checkpoints.target(kind, vocab_size=VOCAB, **config).folder
    # JAX lays arrays out by a program for each shape: one kind has JAX's.
    asarray = jnp.asarray if kind == "qwen3" else np.asarray
    found = dict(hf_named(tunix_state(folder, asarray=asarray), names))
    expected = load_file(folder / "model.safetensors")
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array, err_msg=name)


def test_scanned_layers_are_unrolled(target):
    folder = target.folder
    names = {
        pattern.replace("layers.*", "layers"): ArrayRule(
            (rule if isinstance(rule, str) else rule.name).replace("layers.*", "layers.#"),
            ArrayRule("").layout if isinstance(rule, str) else rule.layout,
            stacked=(1,),
        )
        if "*" in pattern
        else rule
        for pattern, rule in LLAMA3.items()
    }
    found = dict(hf_named(tunix_state(folder, is_scanned=True), names))
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


def test_heads_are_laid_end_to_end():
    array = np.arange(DIM * HEADS * SIZE).reshape(DIM, HEADS, SIZE)
    expected = np.concatenate([array[:, head].T for head in range(HEADS)])
    np.testing.assert_array_equal(from_heads(array), expected)
    back = array.transpose(1, 2, 0)
    expected = np.concatenate([back[head] for head in range(HEADS)]).T
    np.testing.assert_array_equal(to_heads(back), expected)


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


def test_two_arrays_of_one_name_are_refused():
    with pytest.raises(ValueError, match="paths of one name: a, b"):
        hf_named({"a": np.ones(2), "b": np.ones(2), "c": np.ones(1)}, dict(a="x", b="x", c="y"))


def test_stars_without_a_partner_are_refused():
    with pytest.raises(ValueError, match=r"another number of '\*' in the name: \*\.w"):
        hf_named({"a": {"w": np.ones(2)}}, {"*.w": "weight"})
    with pytest.raises(ValueError, match="write one for each axis"):
        ArrayRule("layers.#.w")


def test_an_array_of_the_wrong_rank_is_named():
    tensors = hf_named({"q": np.ones((4, 6))}, {"q": ArrayRule("q.weight", from_heads)})
    with pytest.raises(ValueError, match=r"q, of shape \[4, 6\], cannot be laid out as q.weight"):
        next(tensors)


def adapted(rng):
    """A projection [D, heads, size] with adapters [D, r] and [r, heads, size]."""
    shapes = {"w": (6, 2, 4), "w_lora_a": (6, 3), "w_lora_b": (3, 2, 4)}
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def test_adapters_are_merged():
    q = adapted(np.random.default_rng(0))
    names = {"q.w": ArrayRule("q.weight", from_heads)}
    ((name, found),) = hf_named({"q": q}, names, lora_scale=0.5)
    expected = q["w"] + 0.5 * np.einsum("dr,rnh->dnh", q["w_lora_a"], q["w_lora_b"])
    assert name == "q.weight"
    np.testing.assert_allclose(found, expected.reshape(6, 8).T, rtol=1e-5, atol=1e-6)


def test_adapters_without_a_scale_or_a_partner_are_refused():
    q = adapted(np.random.default_rng(0))
    names = {"q.w": "q.weight"}
    with pytest.raises(ValueError, match=r"q.w_lora_a.*pass lora_scale=alpha / rank"):
        hf_named({"q": q}, names)
    del q["w"], q["w_lora_b"]
    with pytest.raises(ValueError, match=r"q.w_lora_a is without q.w and q.w_lora_b"):
        hf_named({"q": q}, names, lora_scale=1.0)


def test_rules_are_found_by_the_class_of_a_model():
    class Qwen3:
        pass

    class Mine(Qwen3):
        pass

    assert names_of(Mine()) is QWEN3
    assert names_of(object()) is None
