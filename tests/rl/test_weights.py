"""New weights, in whatever form a trainer has them: taken as they are, or not at all."""

import copy
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file
from support.engines import VOCAB, K
from support.refusals import refusal
from support.rollouts import PROMPTS, SAMPLED, copied, noisy
from support.shared_models import llama, parallel_head

from specjax import SamplingParams
from specjax.checkpoint import finite
from specjax.config import SpeculativeConfig
from specjax.device.drafters.registry import load_drafter
from specjax.device.models.registry import load_model
from specjax.device.weights.matrix import Dense
from specjax.rl.weights import checksum, paths, stage_drafter


@pytest.mark.parametrize("kind", ["llama", "qwen3_5"])
def test_weights_under_hugging_face_names(
    build, checkpoints, module, changed, logits_of, compilations, kind
):
    """A state_dict of transformers, an MTP module's tensors among them where there is one."""
    hf = copy.deepcopy(checkpoints.target(kind, vocab_size=VOCAB).hf)
    weights = dict(changed(hf, 1))
    if kind == "llama":
        engine = build(drafts=False)
    else:
        engine = build(module.folder, drafts={"method": "mtp", "num_speculative_tokens": K})
        tensors = load_file(module.folder / "model.safetensors")
        weights |= {n: x + 0.5 for n, x in tensors.items() if n.startswith("mtp.")}
        before = np.array(engine.params.drafter.fc.values)
    params = SamplingParams(temperature=0, max_tokens=12)
    engine.generate(PROMPTS, params)  # which leaves pages, and states, of the old weights
    engine.update_weights(iter(weights.items()))
    assert engine.drafter_version == (0 if kind == "llama" else 1)
    if kind == "qwen3_5":
        np.testing.assert_allclose(engine.params.drafter.fc.values, before + 0.5, atol=1e-6)
    num_programs = engine.metrics().num_compilations
    with compilations.none_expected():  # how names are laid out has been compiled
        engine.update_weights(weights)
        batch = engine.generate(PROMPTS, params)
    assert engine.metrics().num_compilations == num_programs
    for one in batch:
        assert one.token_ids.tolist() == logits_of(hf, one).argmax(axis=-1).tolist()


def test_weights_of_another_type_are_cast(engine, original):
    half = jax.tree.map(lambda x: jnp.array(x.astype(jnp.bfloat16)), original)
    engine.update_weights(half)
    for mine, theirs in zip(
        jax.tree.leaves(engine.params.target), jax.tree.leaves(half), strict=True
    ):
        assert mine.dtype == np.float32
        np.testing.assert_array_equal(mine, np.asarray(theirs).astype(np.float32))


def test_weights_in_the_hosts_memory_and_on_other_devices(engine, original):
    """As trainers offload them, and as they are split over a mesh."""
    device = jax.devices()[0]
    host = jax.sharding.SingleDeviceSharding(device, memory_kind="pinned_host")
    for seed, dtype in ((11, np.float32), (12, jnp.bfloat16)):
        other = jax.tree.map(
            lambda x, dtype=dtype: np.asarray(x).astype(dtype), noisy(original, seed)
        )
        engine.update_weights(jax.device_put(other, host))
        for mine, theirs in zip(
            jax.tree.leaves(engine.params.target), jax.tree.leaves(other), strict=True
        ):
            assert mine.sharding.memory_kind == device.default_memory().kind
            np.testing.assert_array_equal(mine, np.asarray(theirs).astype(np.float32))
    assert len(engine.generate([PROMPTS[0]], SAMPLED)) == 2


def test_nested_mappings_with_the_same_paths(engine, original):
    nested: dict = {}
    other = noisy(original, 9)
    for path, leaf in paths(other).items():
        *folders, last = path.split(".")
        at = nested
        for folder in folders:
            at = at.setdefault(int(folder) if folder.isdigit() else folder, {})
        at[last] = leaf
    engine.update_weights(nested)
    jax.tree.map(np.testing.assert_array_equal, engine.params.target, other)


def test_a_checksum_is_that_of_the_same_weights(engine, original):
    assert engine.checksum() == checksum(original)
    weights = noisy(original, 2)
    engine.update_weights(weights)
    assert engine.checksum() == checksum(weights) != checksum(original)
    leaves, tree = jax.tree.flatten(original)
    for i in range(len(leaves)):
        bits = leaves[i].copy().view(np.uint32)
        bits.flat[-1] ^= 1
        other = [*leaves[:i], bits.view(np.float32), *leaves[i + 1 :]]
        assert checksum(tree.unflatten(other)) != checksum(original)
    flipped = [x[::-1] if x.shape[0] > 1 else x for x in leaves]
    assert checksum(tree.unflatten(flipped)) != checksum(original)


def test_weights_that_do_not_fit_change_nothing(engine, original):
    """Everything that is wrong is named, at once."""
    good = dict(paths(original))
    names = list(good)
    bad = dict(good)
    lost = [names[0], names[7]]
    for name in lost:
        del bad[name]
    bad[names[3]] = np.zeros((3, 5), np.float32)
    bad[names[4]] = good[names[4]].astype(np.int32)
    bad["layers.99.attention.qkv"] = np.zeros(3, np.float32)
    before, version = engine.checksum(), engine.version
    with pytest.raises(ValueError) as caught:
        engine.update_weights(bad)
    text = str(caught.value)
    for word in (*lost, "layers.99.attention.qkv", f"{names[3]} (expected", "found [3, 5]"):
        assert word in text
    assert f"{names[4]} (expected float32, found int32)" in text
    assert engine.checksum() == before and engine.version == version
    with pytest.raises(ValueError, match="twice"):
        engine.update_weights([(names[0], good[names[0]])] * 2)
    for nonsense in (5, "weights", [3], [("a", "b")], None):
        with pytest.raises(ValueError, match="weights"):
            engine.update_weights(nonsense)
    drafter = checksum(engine.params.drafter)
    with pytest.raises(ValueError, match="fc"):
        engine.update_weights(original, drafter={"fc.weight": np.zeros(2, np.float32)})
    assert checksum(engine.params.drafter) == drafter
    assert engine.checksum() == before and engine.version == version


def test_weights_that_are_no_more(engine, original):
    """Donated to the trainer's own step, most often."""
    weights = noisy(original, 1)
    before, leaves = engine.checksum(), jax.tree.leaves(weights)
    leaves[2].delete()
    with pytest.raises(ValueError, match="deleted, or donated"):
        engine.update_weights(weights)
    shapes = jax.eval_shape(lambda x: x, original)
    with pytest.raises(ValueError, match="not an array"):
        engine.update_weights(shapes)
    assert engine.checksum() == before
    assert len(engine.generate(PROMPTS, SAMPLED)) == 2 * len(PROMPTS)


def test_a_draft_vocabulary_is_compiled_in(engine, speculation):
    drafter = jax.tree.map(np.array, engine.params.drafter)
    version = engine.drafter_version
    with pytest.raises(ValueError, match="target_ids"):
        engine.update_drafter(replace(drafter, target_ids=drafter.target_ids[::-1]))
    with pytest.raises(ValueError, match="target_ids"):
        engine.update_drafter(replace(drafter, target_ids=drafter.target_ids[:-1]))
    (file,) = Path(speculation["model"]).glob("*.safetensors")
    tensors = load_file(file)
    for other in (tensors["d2t"][::-1].copy(), tensors["d2t"][:-1]):
        with pytest.raises(ValueError, match="draft vocabulary"):
            engine.update_drafter(tensors | {"d2t": other})
    assert engine.drafter_version == version
    engine.update_drafter(tensors)
    assert engine.drafter_version == version + 1


def test_names_of_hugging_face_that_do_not_fit(engine, hf):
    weights = dict(hf.state_dict())
    lost = "model.layers.0.self_attn.k_proj.weight"
    del weights[lost]
    weights["model.layers.0.self_attn.x_proj.weight"] = weights["model.norm.weight"]
    weights["model.norm.weight"] = weights["model.norm.weight"][:-1]
    before = engine.checksum()
    with pytest.raises(ValueError) as caught:
        engine.update_weights(weights)
    for word in (lost, "x_proj", "model.norm.weight (expected"):
        assert word in str(caught.value)
    assert engine.checksum() == before


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_weights_that_are_not_finite_change_nothing(engine, original, hf, bad):
    before, version = engine.checksum(), engine.version
    spoiled = jax.tree.map(np.array, original)
    spoiled.layers[1].mlp.down.values[3, 4] = bad
    refusal(lambda: engine.update_weights(spoiled), "layers.1.mlp.down", "nothing was changed")
    named = {name: tensor.numpy().copy() for name, tensor in hf.state_dict().items()}
    named["model.norm.weight"][0] = bad
    refusal(lambda: engine.update_weights(named), "infinity in model.norm.weight,")
    drafter = replace(
        copied(engine.params.drafter), fc=Dense(engine.params.drafter.fc.values * bad)
    )
    refusal(lambda: engine.update_drafter(drafter), "the drafter's weights", "in fc,")
    refusal(lambda: engine.update_weights(original, drafter=drafter), "in fc,")
    assert engine.checksum() == before and engine.version == version


def test_looking_for_bad_values_compiles_nothing(
    engine, target, original, compilations, monkeypatch
):
    """On an accelerator: the engine's own shapes were looked at when they were loaded."""
    monkeypatch.setattr(finite, "_is_near", lambda _: False)
    load_model(target.folder, np.dtype(np.float32))
    with compilations.none_expected():
        engine.update_weights(original)


@pytest.mark.parametrize("method", ["p_eagle", "dflash", "medusa", "draft_model"])
def test_the_tensors_of_a_drafters_file_are_its_weights(checkpoints, method):
    """By their published names; a vocabulary beside them must be the one that is compiled in."""
    dtype, folder = np.dtype("float32"), llama(checkpoints).folder
    head = llama(checkpoints, seed=1).folder
    if method != "draft_model":
        head = parallel_head(checkpoints, method)
    target, _ = load_model(folder, dtype)
    config = SpeculativeConfig(method=method, model=str(head), num_speculative_tokens=K)
    drafter, params = load_drafter(head, config, target, dtype)
    tensors = load_file(head / "model.safetensors")
    sources = stage_drafter(tensors, drafter, params)
    for source, own in zip(sources, jax.tree.leaves(params), strict=True):
        np.testing.assert_array_equal(source.copy(own.dtype, own.sharding), own)
    if method == "medusa":
        ids = np.arange(target.vocab_size)
        stage_drafter(tensors | {"token_map": ids}, drafter, params)
        with pytest.raises(ValueError, match="another draft vocabulary .token_map."):
            stage_drafter(tensors | {"token_map": ids[::-1]}, drafter, params)
