"""The effects of options for pages, and the planned bytes of such pages."""

import re

import jax
import numpy as np
import pytest
from support.tiny import tiny_llama

from pallas_kernels.page_formats import FP8, FP8_BYTES, INT8
from specjax.config import SpeculativeConfig
from specjax.device.cache.kind import CacheSizes
from specjax.device.loading import no_log
from specjax.device.models.model import init_caches
from specjax.device.models.registry import load_model
from specjax.serving.memory import target_cache_bytes
from specjax.serving.page_formats import choose_pages
from specjax.serving.source import ModelSource

WINDOWED = tiny_llama(num_layers=4, windows=(8, None, 8, None))


def chosen(dtype, skipped=None, drafters=None, model=WINDOWED, kernels="interpret"):
    config = SpeculativeConfig(method="mtp", num_speculative_tokens=2, kv_cache_dtype=drafters)
    source = ModelSource(model, None, params={})
    return choose_pages(source, config, dtype, skipped, no_log, kernels)


@pytest.mark.parametrize(
    "names, formats",
    [
        (("auto", None), (None, None)),
        (("fp8", None), (FP8, FP8)),
        (("fp8_e4m3", "auto"), (FP8, None)),
        (("int8_per_token_head", "fp8"), (INT8, FP8)),
        (("auto", "int8"), (None, INT8)),
    ],
)
def test_names_are_formats(names, formats):
    dtype, drafters = names
    assert chosen(dtype, drafters=drafters)[1:] == formats
    on_cpu = tuple(FP8_BYTES if one == FP8 else one for one in formats)
    assert chosen(dtype, drafters=drafters, kernels="auto")[1:] == on_cpu


@pytest.mark.parametrize(
    "skipped, kept, layer_kinds",
    [
        ([], (), (0, 1, 0, 1)),
        (["sliding_window"], (0, 2), (0, 1, 0, 1)),
        ([0], (0,), (2, 1, 0, 1)),
        (["0", 1, 3], (0, 1, 3), (2, 1, 0, 1)),
        ([3, "sliding_window"], (0, 2, 3), (0, 1, 0, 2)),
    ],
)
def test_skipped_layers_keep_their_dtype(skipped, kept, layer_kinds):
    """If some layers of a kind are skipped, the kind is split in two. Scales follow the layers."""
    model = chosen("int8", skipped)[0].target
    assert model.kept_layers == kept and model.layer_kinds == layer_kinds
    kinds = model.with_pages(kept, tuple((i, 1.0) for i in range(4))).cache_kinds
    for number, kind in enumerate(kinds):
        layers = [i for i, one in enumerate(layer_kinds) if one == number]
        assert {WINDOWED.windows[i] for i in layers} == {kind.window}
        assert {i in kept for i in layers} == {kind.keeps_dtype}
        assert [scale for scale, _ in kind.layer_scales] == layers
        assert kind.num_layers == len(layers)


BAD = {
    "fp16": ("kv_cache_dtype='fp16' is not supported; choose one of auto, fp8", {}),
    "auto": ("goes with 8-bit pages, not with kv_cache_dtype='auto'; leave", {"skipped": [1]}),
    "int8": ("must be a list of layers' numbers", {"skipped": "sliding_window"}),
    "fp8": ("has 4; name layers with keys and values, which are 0-3, or", {"skipped": [1, 4]}),
    "fp8_e4m3": ("has True", {"skipped": [True]}),
}


@pytest.mark.parametrize("dtype", BAD)
def test_other_values_are_refused(dtype):
    said, options = BAD[dtype]
    with pytest.raises(ValueError, match=re.escape(said)):
        chosen(dtype, **options)
    with pytest.raises(ValueError, match="has 'sliding_window'; name layers .* are 0$"):
        chosen("fp8", ["sliding_window"], model=tiny_llama())
    with pytest.raises(ValueError, match="speculative_config.kv_cache_dtype='int4' is not"):
        chosen("fp8", drafters="int4")


def test_recurrent_layers_have_no_pages(checkpoints):
    model, _ = load_model(checkpoints.target("qwen3_5_text").folder, np.dtype("float32"))
    with pytest.raises(ValueError, match="has 0; name layers with keys and values, which are 1$"):
        chosen("int8", [0], model=model)
    (kept,) = [
        k
        for k in chosen("int8", [1], model=model)[0].target.cache_kinds
        if k.num_layers > 0 and not k.is_recurrent
    ]
    assert kept.keeps_dtype


@pytest.mark.parametrize("stored", [FP8, INT8], ids=["fp8", "int8"])
@pytest.mark.parametrize("kind", ["llama", "deepseek_v3", "qwen3_5_text"])
def test_planned_bytes_are_those_of_the_arrays(kind, stored, checkpoints):
    model, _ = load_model(checkpoints.target(kind).folder, np.dtype("float32"))
    model = model.with_pages((1,), ((1.0, 1.0),) * model.num_layers)
    planned = target_cache_bytes(model, 8, 3, "float32", page_format=stored)
    sizes = CacheSizes(2, 6, 8, 4, page_format=stored)
    made = jax.eval_shape(lambda: init_caches(model, sizes, np.dtype("float32")))
    leaves = [x for x in jax.tree.leaves(made) if x.shape[1:] != (2,)]  # without scales of layers
    size = sum(x.size * x.dtype.itemsize for x in leaves)
    assert 6 * planned.per_page + 2 * planned.per_slot == size
    assert {str(x.dtype) for x in leaves if x.dtype.itemsize == 1} <= {stored.dtype}
