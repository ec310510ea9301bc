"""New weights for engines whose weights are quantised."""

import json
import logging
import math

import jax
import numpy as np
import pytest
from support.engines import SIZES, simulated_engines
from support.logits import hf_logits
from support.refusals import refusal
from support.rollouts import copied, log_softmax, noisy
from support.updates import updated

from specjax import SamplingParams
from specjax.cli import main
from specjax.device.models.registry import (
    describe_checkpoint,
    load_model,
    load_weights,
    read_config,
)
from specjax.device.placement import Placement
from specjax.device.weights.stored import dequantise
from specjax.device.weights.weight import is_weight
from specjax.rl import RolloutEngine, save_model
from specjax.rl.folders import read_weights
from specjax.rl.weights import paths

torch = pytest.importorskip("torch")
pytest.importorskip("compressed_tensors")
AutoModelForCausalLM = pytest.importorskip("transformers").AutoModelForCausalLM
from support.quantised import FORMS  # noqa: E402

pytestmark = pytest.mark.usefixtures("small_test")
FLOAT32 = np.dtype(np.float32)
WIDE = {"hidden_size": 128, "intermediate_size": 192}
LIMITS = {"fp8": 0.04, "int8": 0.02, "int4": 0.15, "fp4": 0.15}  # relative errors of normal numbers


@pytest.fixture(scope="module")
def folder(checkpoints):
    return checkpoints.with_letters(checkpoints.target("llama", **WIDE).folder)


@pytest.fixture(scope="module")
def trained(folder, tmp_path_factory):
    """A folder that a trainer saved: the same model with other weights."""
    model = describe_checkpoint(folder, read_config(folder))
    made, out = load_weights(folder, model, FLOAT32), tmp_path_factory.mktemp("trained") / "out"
    save_model(out, model, noisy(made, 1), folder)
    return out


def weights_of(folder, quantization):
    model = describe_checkpoint(folder, read_config(folder))
    return load_weights(folder, model, FLOAT32, quantization=quantization)


@pytest.mark.slow
@pytest.mark.parametrize("bits", ["fp8", "int8", "int4"])
def test_an_update_is_as_loading_the_new_weights(folder, trained, bits, caplog):
    """Bits are equal for weights from a folder, tensors or a plain tree, awake or asleep."""
    caplog.set_level(logging.INFO, "specjax")
    expected = weights_of(trained, bits)
    tensors = read_weights(trained)
    tree = copied(weights_of(trained, None))
    with simulated_engines(), RolloutEngine(folder, quantization=bits, **SIZES) as engine:
        first = copied(engine.params.target)
        for given in trained, tensors, paths(tree), tree:
            engine.sleep(2)
            made = engine.update_weights(given)
            engine.wake_up()
            jax.tree.map(np.testing.assert_array_equal, engine.params.target, expected)
            num = 7 if bits == "int4" else 9  # 192 inputs make no groups of 128
            line = f"weights of version {made.version}: {num} were quantised to the engine's"
            assert line in caplog.text and "the largest relative error is" in caplog.text
            assert 0 < made.largest_error < LIMITS[bits]
            assert made.num_arrays == len(jax.tree.leaves(tree))
            engine.update_weights(folder)
            jax.tree.map(np.testing.assert_array_equal, engine.params.target, first)
        bad = tensors | {"model.norm.weight": np.full(128, math.nan, np.float32)}
        refusal(lambda: engine.update_weights(bad), "NaN", "nothing was changed")
        wrong = {name: x for name, x in tensors.items() if "q_proj" not in name}
        refusal(lambda: engine.update_weights(wrong), "missing", "q_proj", "nothing was changed")
        refusal(lambda: engine.update_weights(engine.params.target), "dequantise them first")
        jax.tree.map(np.testing.assert_array_equal, engine.params.target, first)


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_every_stored_form_is_as_exact_as_its_tool(checkpoints, rewrite_tensors, form):
    """Merged projections, too. Arrays keep shapes and dtypes, and plain weights are not rounded."""
    target = checkpoints.target("llama", **WIDE)
    narrow = checkpoints.copy(target.folder, quantization_config=FORMS[form].config)
    errors = {}

    def quantise(tensors):
        made = dict(tensors)
        for name, tensor in tensors.items():
            if "_proj" in name and (written := FORMS[form].write(tensor.float())):
                stored, meant = written
                made |= {name.removesuffix("weight") + end: x for end, x in stored.items()}
                errors[name] = float(torch.linalg.norm(meant - tensor) / torch.linalg.norm(tensor))
                if "weight" not in stored:
                    del made[name]
        return made

    rewrite_tensors(narrow / "model.safetensors", quantise)
    model = describe_checkpoint(narrow, read_config(narrow))
    params = load_weights(narrow, model, FLOAT32)
    made = updated(model, params, target.folder)
    jax.tree.map(lambda x, y: (x.shape, x.dtype) == (y.shape, y.dtype) or 1 / 0, made, params)
    given = load_weights(target.folder, model, FLOAT32)
    worst = 1.01 * max(errors.values())
    for new, old, was in zip(
        *(jax.tree.leaves(x, is_leaf=is_weight) for x in (made, given, params)), strict=True
    ):
        if not is_weight(was) or not was.numbers:
            jax.tree.map(np.testing.assert_array_equal, new, old)
            continue
        lost = np.linalg.norm(dequantise(new, FLOAT32).values - np.asarray(old.values))
        lost /= np.linalg.norm(old.values)
        assert 0 < lost < min(worst, LIMITS[was.numbers[0]])


@pytest.mark.slow
def test_rollouts_have_the_log_probabilities_of_the_quantised_model(folder, trained, tmp_path):
    """Rollouts also name the quantisation. The weights come from an update."""
    prompts = [[4, 9, 1], [7, 2, 2, 8]]
    params = SamplingParams(temperature=1.0, max_tokens=12, seed=1, ignore_eos=True)
    with RolloutEngine(folder, quantization="int4", dtype="float32", **SIZES) as engine:
        engine.update_weights(trained)
        batch = engine.generate(prompts, params)
        save_model(tmp_path / "now", engine.target, copied(engine.params.target), folder)
        scored = engine.score(batch)
    assert batch.quantization == batch[0].quantization == "int4"
    hf = AutoModelForCausalLM.from_pretrained(tmp_path / "now", dtype=torch.float32)
    assert "quantization_config" not in json.loads((tmp_path / "now" / "config.json").read_text())
    for rollout, score in zip(batch, scored, strict=True):
        tokens = [*rollout.prompt_token_ids.tolist(), *rollout.token_ids.tolist()]
        rows = hf_logits(hf, [tokens])[0, len(rollout.prompt_token_ids) - 1 : -1]
        expected = log_softmax(rows.astype(np.float64))[range(12), rollout.token_ids]
        np.testing.assert_allclose(rollout.logprobs, expected, atol=2e-4)
        np.testing.assert_allclose(score.logprobs, expected, atol=2e-4)


@pytest.mark.slow
@pytest.mark.parametrize("kind, bits", [("llama", "fp8"), ("qwen3_moe", "int8")])
def test_weights_that_are_divided_over_devices(checkpoints, tmp_path, kind, bits):
    """Each device rounds its part. A folder of compressed-tensors is divided as it is stored."""
    source = checkpoints.target(kind).folder
    assert main(["quantize", str(source), str(tmp_path), "--quantization", bits]) == 0
    placement = Placement.on(*jax.devices()[:2])
    model, params = load_model(tmp_path, FLOAT32, placement)
    kinds = [x.numbers for x in jax.tree.leaves(params, is_leaf=is_weight) if is_weight(x)]
    assert (bits,) in kinds
    other = jax.tree.map(lambda x: x if x.dtype == np.int32 else 0 * x, params)
    made = updated(model, other, source)
    for new, old in zip(*map(jax.tree.leaves, (made, params)), strict=True):
        assert new.sharding == old.sharding and new.dtype == old.dtype
    given = load_model(source, FLOAT32, placement)[1]
    for new, old in zip(*map(jax.tree.leaves, (dequantise(made, FLOAT32), given)), strict=True):
        assert np.linalg.norm(new - old) <= LIMITS[bits] * np.linalg.norm(old)
