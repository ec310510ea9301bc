"""Conversions between file tensors and arrays put each element where the file's layout has it."""

from itertools import accumulate, pairwise
from math import prod

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from specjax.checkpoint.spec import (
    TensorSpec,
    depthwise,
    experts,
    fused_experts,
    projection,
    stored,
)

FLOAT32 = np.dtype(np.float32)


def numbered(spec):
    """Return file tensors of the spec in which all elements differ."""
    ends = [*accumulate(map(prod, spec.file_shapes), initial=1)]
    numbers = [np.arange(start, end, dtype=np.float32) for start, end in pairwise(ends)]
    return [x.reshape(shape) for x, shape in zip(numbers, spec.file_shapes, strict=True)]


def check(pairs):
    """For pairs (spec, expected array): `join` gives the array, and `split` inverts `join`.

    `join` gives the same array on the host.
    """
    specs, expected = zip(*pairs, strict=True)
    join = jax.jit(lambda parts: [s.join(p, FLOAT32) for s, p in zip(specs, parts, strict=True)])
    joined = join([numbered(spec) for spec in specs])
    for spec, array, wanted in zip(specs, joined, expected, strict=True):
        assert array.shape == spec.shape == wanted.shape
        np.testing.assert_array_equal(array, wanted, str(spec))
        parts, back = numbered(spec), spec.split(wanted)
        on_host = spec.join(parts, FLOAT32)
        assert isinstance(on_host, np.ndarray)
        np.testing.assert_array_equal(on_host, wanted, str(spec))
        if spec.is_stored:
            np.testing.assert_array_equal(parts[0], wanted)
        assert tuple(back) == spec.names
        for name, shape, part in zip(spec.names, spec.file_shapes, parts, strict=True):
            assert back[name].shape == shape and back[name].flags.c_contiguous
            np.testing.assert_array_equal(back[name], part)


def test_what_each_kind_of_spec_makes():
    one, pair = stored(["a"], (4, 3)), stored(["a", "b"], (2, 3), (5, 3))
    conv, fused = depthwise("conv1d.weight", 6, 4), fused_experts("gate_up", 3, 5, 8)
    swapped = fused_experts("gate_up", 3, 5, 8, is_swapped=True)
    merged = projection(["q", "k"], 7, [6, 2])
    single = experts([["0.gate", "0.up"], ["1.gate", "1.up"]], 5, [2, 3])
    assert one.is_stored and swapped.is_stored and not (pair.is_stored or fused.is_stored)
    assert single.names == ("0.gate", "0.up", "1.gate", "1.up")
    gate_0, up_0, gate_1, up_1 = (x.T for x in numbered(single))
    check(
        [
            (one, numbered(one)[0]),
            (pair, np.concatenate(numbered(pair))),
            (conv, numbered(conv)[0][:, 0].T),
            (fused, numbered(fused)[0].swapaxes(1, 2)),
            (swapped, numbered(swapped)[0]),
            (merged, np.concatenate(numbered(merged)).T),
            (single, np.stack([np.hstack([gate_0, up_0]), np.hstack([gate_1, up_1])])),
        ]
    )


def test_interleaved_projections_by_hand():
    """Cases: rows interleaved as 1 query, 2 keys, 1 value; pairs of rows; and a plain part."""
    parts = {"qkv": (1, 2, 1), "gated": (2, 2)}
    spec = projection(["qkv", "gated", "out"], 2, [8, 4, 1], interleaved=parts)
    order = [0, 4, 1, 2, 5, 6, 3, 7, *range(8, 13)]
    check([(spec, np.concatenate(numbered(spec))[order].T)])
    mixed = TensorSpec(  # in two stacked groups, as it is stored
        tuple("abcd"), ((6, 3), (1, 3)) * 2, interleaved=((1, 2), ()) * 2, num_stacked=2
    )
    one_run = np.array([0, 3, 1, 2, 4, 5, 6])
    check([(mixed, np.stack(np.split(np.concatenate(numbered(mixed)), 2))[:, one_run])])


@pytest.mark.parametrize("dtype", ["float32", None])
@pytest.mark.parametrize("in_file", [np.float16, ml_dtypes.bfloat16])
def test_a_dtype_of_its_own_outlives_the_models(dtype, in_file):
    spec = TensorSpec(("A_log",), ((4,),), dtype=dtype)
    values = np.array([0.1, -2.7, 3.14159, 1e-3]).astype(in_file)
    array = spec.join([jnp.array(values)], np.dtype(ml_dtypes.bfloat16))
    assert array.dtype == (np.float32 if dtype else ml_dtypes.bfloat16)
    np.testing.assert_array_equal(array, values.astype(array.dtype))


@pytest.mark.parametrize("given", [1, 3])
def test_the_number_of_parts_is_checked(given):
    spec = projection(["a", "b"], 2, [2, 2])
    with pytest.raises(ValueError):
        spec.join([jnp.zeros((2, 2))] * given, FLOAT32)
