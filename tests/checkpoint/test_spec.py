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


def check(*pairs):
    """Of each spec and what is expected: join gives it, and split undoes it."""
    specs, expected = zip(*pairs, strict=True)
    join = jax.jit(lambda parts: [s.join(p, FLOAT32) for s, p in zip(specs, parts, strict=True)])
    joined = join([numbered(spec) for spec in specs])
    for spec, array, wanted in zip(specs, joined, expected, strict=True):
        assert array.shape == spec.shape == wanted.shape
        np.testing.assert_array_equal(array, wanted, str(spec))
        check_split(spec, wanted)


def check_split(spec, expected):
    parts = numbered(spec)
    if spec.is_stored:
        np.testing.assert_array_equal(parts[0], expected)
    back = spec.split(expected)
    assert tuple(back) == spec.names
    for name, shape, part in zip(spec.names, spec.file_shapes, parts, strict=True):
        assert back[name].shape == shape and back[name].flags.c_contiguous
        np.testing.assert_array_equal(back[name], part)


INTERLEAVED = {
    "none": ((6, 4, 4), {}),
    "query-and-gate": ((12, 4), {0: (3, 3)}),
    "one-head": ((5,), {0: (2, 3)}),
    "four-parts": ((20,), {0: (2, 2, 3, 3)}),
    "several": ((24, 6, 8), {0: (2, 2, 4, 4), 2: (1, 1)}),
    "last-only": ((3, 9), {1: (1, 1, 1)}),
}


@pytest.mark.parametrize("outs, sizes", INTERLEAVED.values(), ids=INTERLEAVED.keys())
def test_projections_that_share_an_input(outs, sizes):
    names = [f"{i}.weight" for i in range(len(outs))]
    spec = projection(names, 7, outs, interleaved={names[i]: s for i, s in sizes.items()})
    expected = np.full((7, sum(outs)), np.nan, np.float32)
    for i, tensor in enumerate(numbered(spec)):
        for row in range(outs[i]):
            column = sum(outs[:i]) + place_of(row, sizes.get(i, ()), outs[i])
            for channel in range(7):
                expected[channel, column] = tensor[row, channel]
    assert not np.isnan(expected).any()
    check((spec, expected))


def test_interleaved_projections_by_hand():
    """Two heads, each a query row, two key rows and a value row."""
    spec = projection(["qkv"], 1, [8], interleaved={"qkv": (1, 2, 1)})
    file = np.array([[10], [11], [12], [13], [20], [21], [22], [23]], np.float32)
    array = np.asarray(spec.join([jnp.array(file)], FLOAT32))
    assert array.tolist() == [[10, 20, 11, 12, 21, 22, 13, 23]]
    np.testing.assert_array_equal(spec.split(array)["qkv"], file)


@pytest.mark.parametrize("shapes", [[(5,)], [(4, 3)], [(2,), (3,), (1,)], [(2, 3), (5, 3)]])
def test_stored_tensors_lie_end_to_end(shapes):
    spec = stored([f"{i}" for i in range(len(shapes))], *shapes)
    check((spec, np.array([row for tensor in numbered(spec) for row in tensor])))


@pytest.mark.parametrize("channels, taps", [(6, 4), (1, 4), (3, 1), (1, 1)])
def test_a_depthwise_convolution(channels, taps):
    spec = depthwise("conv1d.weight", channels, taps)
    (tensor,) = numbered(spec)
    assert tensor.shape == (channels, 1, taps)
    expected = [[tensor[c, 0, tap] for c in range(channels)] for tap in range(taps)]
    check((spec, np.array(expected)))


@pytest.mark.parametrize("num_experts", [1, 3])
@pytest.mark.parametrize("outs", [(4,), (4, 4), (2, 3, 1)])
def test_experts_of_their_own_tensors(num_experts, outs):
    names = [[f"{e}.{i}" for i in range(len(outs))] for e in range(num_experts)]
    spec = experts(names, 5, outs)
    assert spec.names == tuple(name for one in names for name in one)
    tensors = numbered(spec)
    expected = [
        [
            [tensors[e * len(outs) + i][row, c] for i, out in enumerate(outs) for row in range(out)]
            for c in range(5)
        ]
        for e in range(num_experts)
    ]
    check((spec, np.array(expected)))


@pytest.mark.parametrize("num_experts", [1, 3])
def test_experts_in_one_tensor(num_experts):
    spec = fused_experts("gate_up_proj", num_experts, 5, 8)
    (tensor,) = numbered(spec)
    assert tensor.shape == (num_experts, 8, 5)
    expected = [
        [[tensor[e, row, c] for row in range(8)] for c in range(5)] for e in range(num_experts)
    ]
    check((spec, np.array(expected)))


def test_both_layouts_of_experts_are_one_array():
    rng = np.random.default_rng(0)
    fused = rng.standard_normal((3, 8, 5)).astype(np.float32)
    singles = [half for expert in fused for half in np.split(expert, 2)]
    names = [[f"{e}.gate", f"{e}.up"] for e in range(3)]
    np.testing.assert_array_equal(
        experts(names, 5, [4, 4]).join(list(map(jnp.array, singles)), FLOAT32),
        fused_experts("fused", 3, 5, 8).join([jnp.array(fused)], FLOAT32),
    )


def test_any_mix_of_options():
    """Interleaved parts within stacked runs, transposed or not."""
    check(*map(random_spec, range(20)))


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
@pytest.mark.parametrize("in_file", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("of_model", [np.float32, ml_dtypes.bfloat16])
def test_a_dtype_of_its_own_outlives_the_models(dtype, in_file, of_model):
    spec = TensorSpec(("A_log",), ((4,),), dtype=dtype)
    values = np.array([0.1, -2.7, 3.14159, 1e-3]).astype(in_file)
    array = spec.join([jnp.array(values)], np.dtype(of_model))
    assert array.dtype == (np.float32 if dtype else of_model)
    np.testing.assert_array_equal(array, values.astype(array.dtype))


@pytest.mark.parametrize("given", [1, 3])
def test_the_number_of_parts_is_checked(given):
    spec = projection(["a", "b"], 2, [2, 2])
    with pytest.raises(ValueError):
        spec.join([jnp.zeros((2, 2))] * given, FLOAT32)
