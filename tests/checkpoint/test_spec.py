"""Arrays from file tensors and back, each element against where the file's layout puts it."""

from itertools import accumulate

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
    """File tensors of the spec, no two elements alike."""
    sizes = [int(np.prod(shape)) for shape in spec.file_shapes]
    starts = accumulate(sizes, initial=1)
    return [
        np.arange(start, start + size, dtype=np.float32).reshape(shape)
        for start, size, shape in zip(starts, sizes, spec.file_shapes, strict=False)
    ]


def place_of(row, sizes, num_rows):
    """Where a file row goes whose tensor has parts of these sizes in turn, one group a head."""
    if not sizes:
        return row
    head, inside = divmod(row, sum(sizes))
    for part, size in enumerate(sizes):
        if inside < size:
            return sum(sizes[:part]) * (num_rows // sum(sizes)) + head * size + inside
        inside -= size
    raise AssertionError


def check(pairs):
    """Of each spec and what is expected: join gives it, and split undoes it."""
    specs, expected = zip(*pairs, strict=True)
    join = jax.jit(lambda parts: [s.join(p, FLOAT32) for s, p in zip(specs, parts, strict=True)])
    joined = join([numbered(spec) for spec in specs])
    for spec, array, wanted in zip(specs, joined, expected, strict=True):
        assert array.shape == spec.shape == wanted.shape
        np.testing.assert_array_equal(array, wanted, str(spec))
        parts, back = numbered(spec), spec.split(wanted)
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
    """Two heads, each a query row, two key rows and a value row; then an output of its own."""
    spec = projection(["o", "qkv"], 1, [1, 8], interleaved={"qkv": (1, 2, 1)})
    file = np.array([[10], [11], [12], [13], [20], [21], [22], [23]], np.float32)
    array = np.asarray(spec.join([jnp.zeros((1, 1)), jnp.array(file)], FLOAT32))
    assert array.tolist() == [[0, 10, 20, 11, 12, 21, 22, 13, 23]]
    np.testing.assert_array_equal(spec.split(array)["qkv"], file)


def test_any_mix_of_options():
    """Interleaved parts within stacked runs, transposed or not."""
    check(map(random_spec, range(20)))


def random_spec(seed):
    """A spec, and what its array should be."""
    rng = np.random.default_rng(seed)
    num_runs, per_run, width = rng.integers(1, 4), rng.integers(1, 4), int(rng.integers(1, 5))
    transpose, is_stacked = bool(rng.integers(2)), bool(rng.integers(2))
    one_run = []
    for _ in range(per_run):
        sizes = tuple(map(int, rng.integers(1, 4, rng.integers(5))))
        one_run.append((sizes, sum(sizes or (1,)) * int(rng.integers(1, 4))))
    runs = [one_run] * (num_runs if is_stacked else 1)
    layout = [entry for run in runs for entry in run]
    spec = TensorSpec(
        tuple(map(str, range(len(layout)))),
        tuple((rows, width) for _, rows in layout),
        transpose=transpose,
        interleaved=tuple(sizes for sizes, _ in layout),
        num_stacked=len(runs) if is_stacked else 0,
    )
    tensors, total = iter(numbered(spec)), sum(rows for _, rows in one_run)
    expected = np.full((len(runs), total, width), np.nan, np.float32)
    for run in range(len(runs)):
        start = 0
        for sizes, rows in one_run:
            tensor = next(tensors)
            for row in range(rows):
                expected[run, start + place_of(row, sizes, rows)] = tensor[row]
            start += rows
    expected = expected.swapaxes(1, 2) if transpose else expected
    return spec, expected if is_stacked else expected[0]


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
