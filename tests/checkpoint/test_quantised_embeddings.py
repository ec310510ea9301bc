"""Embeddings quantised by compressed-tensors stay packed, and rows are dequantised when read."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.engines import generate_tokens, make_llm, random_prompts
from support.logits import causal_logits, hf_logits
from support.updates import updated

from specjax import SamplingParams
from specjax.device.models.registry import load_model, save_model
from specjax.device.placement import Placement
from specjax.device.weights.stored import dequantise
from specjax.device.weights.stored_table import StoredTable
from specjax.inspect.step import open_parts
from specjax.serving.memory import weight_bytes
from specjax.serving.source import open_model

torch = pytest.importorskip("torch")
pytest.importorskip("compressed_tensors")
AutoModelForCausalLM = pytest.importorskip("transformers").AutoModelForCausalLM
from support.quantised import FORMS  # noqa: E402

FLOAT32 = np.dtype(np.float32)
NAME = "model.embed_tokens.weight"


@pytest.fixture(
    scope="module", params=[("pack-32", True), ("int-channel", False), ("pack-64", True)], ids=str
)
def folders(request, checkpoints, rewrite_tensors):
    """Return two folders of one model: with a quantised and with a dequantised embedding."""
    form, is_tied = request.param
    target = checkpoints.target("llama", hidden_size=64, tie_word_embeddings=is_tied).folder
    config = FORMS[form].config | {"ignore": []}
    group = {**config["config_groups"]["group_0"], "targets": ["Embedding"]}
    config["config_groups"] = {"group_0": group}
    plain, narrow = checkpoints.copy(target), checkpoints.copy(target, quantization_config=config)

    def edit(tensors, stored):
        written: Any = FORMS[form].write(tensors[NAME].float())
        if not stored:
            return tensors | {NAME: written[1]}
        left = {n: x for n, x in tensors.items() if n != NAME}
        return left | {NAME.removesuffix("weight") + n: x for n, x in written[0].items()}

    for folder in narrow, plain:
        rewrite_tensors(folder / "model.safetensors", lambda x, f=folder: edit(x, f == narrow))
    return narrow, plain


@pytest.mark.slow
def test_they_stay_packed(folders, tmp_path):
    """Rows equal the tool's bit for bit, also on several devices and after an update."""
    (model, params), (_, expected) = (load_model(one, FLOAT32) for one in folders)
    assert type(params.embedding) is StoredTable
    jax.tree.map(np.testing.assert_array_equal, dequantise(params, FLOAT32), expected)
    size = sum(x.nbytes for x in jax.tree.leaves(params))
    assert weight_bytes(open_model(folders[0]).specs, "float32") == size
    assert size < sum(x.nbytes for x in jax.tree.leaves(expected))
    described = open_parts(str(folders[0]), None, None, "bfloat16").params.target.embedding
    assert jax.eval_shape(lambda x: x.rows(jnp.zeros(2, int)), described).dtype == jnp.bfloat16
    ids = jnp.array([3, 95, 0, 3])
    np.testing.assert_array_equal(
        params.embedding.rows(ids), np.asarray(expected.embedding.values)[ids]
    )
    placement = Placement.on(*jax.devices()[:2])
    divided = [load_model(one, FLOAT32, placement)[1] for one in folders]
    assert type(divided[0].embedding) is StoredTable
    jax.tree.map(np.testing.assert_array_equal, dequantise(divided[0], FLOAT32), divided[1])
    made = dequantise(updated(model, params, folders[1]), FLOAT32)
    np.testing.assert_allclose(made.embedding.values, expected.embedding.values, atol=0.2)
    save_model(tmp_path / "saved", model, params, folders[0])
    saved = load_model(tmp_path / "saved", FLOAT32)[1]
    jax.tree.map(np.testing.assert_array_equal, saved, expected)


@pytest.mark.slow
def test_logits_are_those_of_the_model_that_they_stand_for(folders):
    tokens = np.random.default_rng(0).integers(0, 96, (2, 24))
    hf = AutoModelForCausalLM.from_pretrained(folders[1], dtype=torch.float32)
    np.testing.assert_allclose(causal_logits(folders[0], tokens), hf_logits(hf, tokens), atol=1e-4)


@pytest.mark.nightly
def test_the_same_tokens_with_drafts_and_on_two_devices(folders):
    prompts = random_prompts(5, 20, 33, vocab_size=96)
    params = [SamplingParams(temperature=t, seed=3, max_tokens=20) for t in (0.0, 0.8, 1.0)]
    made = []
    for method, count in (None, 1), ("ngram", 2):
        with make_llm(folders[0], method, dtype="float32", tensor_parallel_size=count) as llm:
            made.append(generate_tokens(llm, prompts, params))
    assert made[0] == made[1]
