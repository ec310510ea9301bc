"""New weights in any form that trainers use: accepted unchanged, or refused."""

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
from support.rollouts import PROMPTS, SAMPLED, changed, copied, logits_of, noisy
from support.shared_models import llama, parallel_head

from specjax import SamplingParams
from specjax.checkpoint import finite
from specjax.config import SpeculativeConfig
from specjax.device.drafters.registry import load_drafter
from specjax.device.models.registry import load_model
from specjax.device.weights.matrix import Dense
from specjax.rl.checksum import checksum
from specjax.rl.weights import paths, stage_drafter


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "qwen3_5"])
def test_weights_under_hugging_face_names(build, checkpoints, module, compilations, kind):
    """The weights are a transformers state_dict, with an MTP module's tensors if it has any."""
    hf = copy.deepcopy(checkpoints.target(kind, vocab_size=VOCAB).hf)
    weights = changed(hf, 1)
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


def test_weights_of_other_types_and_places(engine, original):
    """Trainers may keep weights in other dtypes, or in host memory."""
    device = jax.devices()[0]
    host = jax.sharding.SingleDeviceSharding(device, memory_kind="pinned_host")
    for seed, dtype, place in (11, np.float32, host), (12, jnp.bfloat16, host), (13, "f2", device):
        moved = noisy(original, seed)
        other = jax.tree.map(lambda x, dtype=dtype: np.asarray(x).astype(dtype), moved)
        engine.update_weights(jax.device_put(other, place))
        for mine, theirs in zip(*map(jax.tree.leaves, (engine.params.target, other)), strict=True):
            assert mine.sharding.memory_kind == device.default_memory().kind
            np.testing.assert_array_equal(mine, theirs.astype(np.float32))
            assert mine.dtype == np.float32
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


def test_drafters_that_do_not_fit_change_nothing(engine, original):
    own = copied(engine.params.drafter)
    spoiled = replace(own, fc=Dense(own.fc.values * np.nan))
    before = engine.checksum(), checksum(own), engine.version
    cut = {"fc.weight": np.zeros(2, np.float32)}
    refusal(lambda: engine.update_drafter(spoiled), "the drafter's weights", "in fc,")
    refusal(lambda: engine.update_weights(original, drafter=spoiled), "in fc,", "nothing was")
    refusal(lambda: engine.update_weights(original, drafter=cut), "drafter's weights", "fc.weight")
    assert (engine.checksum(), checksum(engine.params.drafter), engine.version) == before


def test_a_draft_vocabulary_is_compiled_in(engine, speculation):
    drafter, version = copied(engine.params.drafter), engine.drafter_version
    tensors = load_file(next(Path(speculation["model"]).glob("*.safetensors")))
    for part in slice(None, None, -1), slice(-1):  # in another order, or shorter
        other = replace(drafter, target_ids=drafter.target_ids[part])
        refusal(lambda other=other: engine.update_drafter(other), "target_ids")
        offsets = tensors | {"d2t": tensors["d2t"][part].copy()}
        refusal(lambda other=offsets: engine.update_drafter(other), "draft vocabulary")
    assert engine.drafter_version == version
    engine.update_drafter(tensors)
    assert engine.drafter_version == version + 1


def test_looking_for_bad_values_compiles_nothing(
    engine, target, original, compilations, monkeypatch
):
    """On an accelerator, the check's programs were compiled when the weights were loaded."""
    monkeypatch.setattr(finite, "_is_near", lambda _: False)
    load_model(target.folder, np.dtype(np.float32))
    with compilations.none_expected():
        engine.update_weights(original)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["p_eagle", "dflash", "medusa", "draft_model"])
def test_the_tensors_of_a_drafters_file_are_its_weights(checkpoints, method):
    """Tensors have their published names. A draft vocabulary among them must be unchanged."""
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
