"""Scales of keys and values in checkpoints: all names, and tensors that are no valid scale."""

import re

import numpy as np
import pytest
from safetensors.numpy import save_file
from support.engines import make_llm
from support.weights import rewrite

from specjax import SamplingParams
from specjax.checkpoint.errors import CheckpointError
from specjax.checkpoint.files import open_checkpoint
from specjax.checkpoint.kv_scales import KVScales, read_kv_scales
from specjax.device.loading import no_log
from specjax.serving.page_formats import choose_pages
from specjax.serving.source import open_model

# Names of the scales of a layer's keys and of its values, after the name of its attention.
NAMES = {
    "projections": ("k_proj.k_scale", "v_proj.v_scale"),
    "compressed-tensors": ("k_proj.output_scale", "v_proj.output_scale"),
    "merged": ("qkv_proj.k_scale", "qkv_proj.v_scale"),
    "attn": ("attn.k_scale", "attn.v_scale"),
    "attention": ("k_scale", "v_scale"),
}


def read(folder, tensors):
    """Return the scales of two layers, from a checkpoint with these tensors under longer names."""
    longer = {f"model.language_model.{name}": np.asarray(x) for name, x in tensors.items()}
    save_file({**longer, "x.k_scale": np.full(2, 7)}, folder / "model.safetensors")

    def rename(name):
        return name.replace("model.", "model.language_model.")

    attentions = [f"model.layers.{i}.self_attn" for i in range(2)]
    return read_kv_scales(open_checkpoint(folder), attentions, rename)


@pytest.mark.parametrize("names", NAMES.values(), ids=NAMES)
def test_scales_have_many_names(names, tmp_path):
    """Scales also have several shapes and dtypes. A missing scale is 1."""
    k, v = (f"layers.1.self_attn.{name}" for name in names)
    tensors = {k: np.full((1, 1), 0.25, np.float32), v: np.full(1, 3, np.float16)}
    assert read(tmp_path, tensors) == (KVScales(), KVScales(0.25, 3.0))
    assert read(tmp_path, {k: np.float32(0.5)}) == (KVScales(), KVScales(0.5, 1.0))


def test_older_exports_have_a_scale_of_both(tmp_path):
    both = {"layers.0.self_attn.kv_scale": np.float32(0.5)}
    assert read(tmp_path, both) == (KVScales(0.5, 0.5), KVScales())
    assert read(tmp_path, {"layers.0.mlp.k_scale": np.float32(0.5)}) == ()


BAD = {
    "nan": np.float32(np.nan),
    "inf": np.float32(np.inf),
    "0.0": np.float32(0),
    "-2.0": np.full(1, -2, np.float32),
    "it has shape [2]": np.ones(2, np.float32),
    "it has shape [0]": np.ones(0, np.float32),
}


@pytest.mark.parametrize("said", BAD)
def test_what_is_not_a_scale_is_named(said, tmp_path):
    name = "layers.0.self_attn.v_proj.v_scale"
    with pytest.raises(CheckpointError, match=f"{re.escape(name)} .*{re.escape(said)}"):
        read(tmp_path, {name: BAD[said]})


def with_scales(checkpoints, kind, scales):
    """Return a copy of a tiny target with scales, given by layer and name."""
    import torch

    folder = checkpoints.copy(checkpoints.target(kind).folder)
    named = {
        f"model.layers.{layer}.self_attn.{name}": torch.tensor(scale)
        for (layer, name), scale in scales.items()
    }
    rewrite(folder / "model.safetensors", lambda tensors: tensors | named)
    return folder


@pytest.mark.parametrize(
    "kind, expected",
    [
        ("llama", ((1.0, 1.0), (0.5, 0.25))),
        ("deepseek_v3", ((1.0, 1.0), (0.5, 0.5))),
        ("qwen3_5_text", ((1.0, 1.0), (0.5, 0.25))),  # whose first layer has no pages
    ],
)
def test_layers_get_their_scales(kind, expected, checkpoints):
    """Latents and their rotated parts use the keys' scale.

    With int8, the checkpoint's scales are unused.
    """
    scales = {(1, "k_proj.k_scale"): 0.5, (1, "v_proj.v_scale"): 0.25}
    source = open_model(with_scales(checkpoints, kind, scales))
    lines = []
    made = choose_pages(source, None, "fp8", None, lines.append).source.target
    assert made.layer_scales == expected
    first = made.cache_kinds[0]
    assert first.layer_scales == expected[-first.num_layers :]
    assert "scales in 1 layers" in lines[0]
    assert choose_pages(source, None, "int8", None, no_log).source is source


@pytest.mark.nightly
def test_a_scale_that_is_too_small_cuts_values(checkpoints):
    """A tiny scale changes outputs with fp8 pages, which use scales, but not with plain pages."""
    plain = checkpoints.target("llama").folder
    names = [(layer, f"{one}_proj.{one}_scale") for layer in (0, 1) for one in "kv"]
    scaled = with_scales(checkpoints, "llama", dict.fromkeys(names, 1e-6))

    def logprobs(folder, dtype):
        with make_llm(folder, kv_cache_dtype=dtype, compile_ahead=False) as llm:
            prompt = {"prompt_token_ids": [3, 5, 8, 13]}
            params = SamplingParams(prompt_logprobs=0, max_tokens=1)
            (output,) = llm.generate(prompt, params, use_tqdm=False)
            return [next(iter(one.values())).logprob for one in output.prompt_logprobs[1:]]

    exact = logprobs(plain, "auto")
    assert logprobs(scaled, "auto") == exact
    np.testing.assert_allclose(logprobs(plain, "fp8"), exact, atol=0.05)
    assert np.abs(np.subtract(logprobs(scaled, "fp8"), exact)).max() > 0.1
