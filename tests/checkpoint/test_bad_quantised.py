"""Damaged tensors of quantised matrices, for every format, tensor and kind of damage.

Errors name the tensor. The tensors are in memory; no other tensor is loaded.
"""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from support.refusals import refusal

from specjax.checkpoint.errors import CheckpointError
from specjax.checkpoint.files import TensorFiles
from specjax.checkpoint.finite import FLOATS
from specjax.checkpoint.quantised.registry import FORMATS, described, read_format

torch = pytest.importorskip("torch")
pytest.importorskip("compressed_tensors")
from support.quantised import FORMS, compressed  # noqa: E402

FLOAT32 = np.dtype(np.float32)
ALL = FORMS | {
    f"float-{strategy}": compressed("float-quantized", type="float", num_bits=8, strategy=strategy)
    for strategy in ("channel", "tensor")
}
SCALES = "weight_scale", "weight_scale_inv", "scales", "weight_global_scale", "weight_scale_2"
UNUSED = ("input_scale",)
EIGHT_BITS = {name for name in ALL if name.startswith(("fp8", "float", "int"))}


def as_array(tensor):
    if tensor.dtype == torch.float8_e4m3fn:
        return tensor.view(torch.uint8).numpy().view(ml_dtypes.float8_e4m3fn)
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.uint16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()


def read(form, arrays):
    """Return the matrix m.weight, given the tensors in which a quantised format stores it."""
    tensors: Any = {
        f"m.{name}": SimpleNamespace(
            path=Path("file"), dtype=x.dtype, shape=x.shape, read=lambda x=x: x
        )
        for name, x in arrays.items()
    }
    read_as: Any = read_format(ALL[form].config)
    made = read_as.join(TensorFiles(Path("folder"), tensors), FLOAT32)
    return made.tensors["m.weight"].read()


@pytest.fixture(scope="module", params=ALL)
def written(request):
    weight = torch.tensor(np.random.default_rng(0).normal(0, 0.1, (32, 128)).astype(np.float32))
    written: Any = ALL[request.param].write(weight)
    stored, meant = written
    return request.param, {name: as_array(x) for name, x in stored.items()}, meant.numpy()


@pytest.mark.slow
def test_what_is_whole_is_read(written):
    form, arrays, meant = written
    np.testing.assert_allclose(read(form, arrays), meant, rtol=0.01)  # some tools round to bfloat16


def test_scales_that_are_no_positive_numbers(written):
    form, arrays, _ = written
    for name in set(SCALES) & set(arrays):
        x = arrays[name]
        if x.dtype == np.uint8:  # exponents: 255 is NaN
            bad = [np.uint8(255)]
        else:
            bad = [x.dtype.type(value) for value in (-1.0, np.nan, np.inf, 0.0)]
            is_float8 = x.dtype == ml_dtypes.float8_e4m3fn  # without infinity; 0 is tiny
            bad = bad[:2] if is_float8 else bad
        for value in bad:
            damaged = x.copy()
            damaged.reshape(-1)[-1] = value
            refusal(lambda y=damaged, n=name: read(form, arrays | {n: y}), f"m.{name}", "scales")


def test_tensors_that_are_missing(written):
    form, arrays, _ = written
    for name in arrays.keys() - {*UNUSED, "g_idx", "weight_zero_point"}:
        left = {n: x for n, x in arrays.items() if n != name}
        if form in EIGHT_BITS or name == "weight_scale_2":
            if name in SCALES:  # refused later, with all other tensors that do not fit
                assert read(form, left).dtype not in FLOATS
        elif not name.endswith(("weight_packed", "qweight")):
            refusal(lambda x=left: read(form, x), f"m.{name}")


@pytest.mark.slow
def test_tensors_of_wrong_shapes(written):
    """The shapes have another size along one axis, or another number of axes.

    Some wrong shapes are read without an error: as a matrix of another shape, which the model then
    refuses, or as a matrix with other groups.
    """
    form, arrays, meant = written
    for name in arrays.keys() - {*UNUSED, "weight_shape"}:
        x = arrays[name]
        bad = [np.concatenate([x, x], axis) for axis in range(x.ndim)]
        bad += [x.reshape(-1)[:5].copy(), x[None, None]] if x.size > 1 else []
        for damaged in bad:
            try:
                made = read(form, arrays | {name: damaged})
            except CheckpointError as error:
                assert re.match(r"folder: m\.\w+ (must be .* got \[|has 8-bit)", str(error))
            else:
                # Words of twice the width have eight bits.
                is_other = form.startswith("pack") or (form in EIGHT_BITS and name in SCALES)
                assert made.shape != meant.shape or is_other


def test_groups_that_do_not_cover_their_inputs(written):
    form, arrays, _ = written
    if "g_idx" not in arrays:
        return
    for damaged in (0 * arrays["g_idx"], arrays["g_idx"] - 1, arrays["g_idx"] + 1):
        if form.startswith("gptq-v2") and not damaged.any():
            continue  # one group has all inputs
        refusal(lambda y=damaged: read(form, arrays | {"g_idx": y}), "m.g_idx must give each")


@pytest.mark.parametrize(
    "config",
    [
        {"quant_method": "gptq", "bits": 8, "group_size": 128},
        {"quant_method": "gptq", "bits": 4, "group_size": 128, "checkpoint_format": "marlin"},
        {"quant_method": "awq", "bits": 8, "group_size": 128},
        {"quant_method": "fp8", "fmt": "e5m2"},
        {"quant_method": "fp8", "weight_block_size": [0, 128]},
        {"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"},
        compressed("float-quantized", num_bits=6, type="float", strategy="channel").config,
        compressed("pack-quantized", num_bits=2, strategy="group", group_size=32).config,
        {"quant_method": "hqq"},
        {"quant_method": None},
        [],
    ],
)
def test_other_formats_are_not_read(config):
    """Other formats give None. The error message for such a checkpoint lists all known formats."""
    assert read_format(config) is None
    assert all(one.described in described() for one in FORMATS)
