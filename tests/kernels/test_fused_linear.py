"""Every implementation of the projection with its neighbours against its equations in f64."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels.fused_linear as fused
from pallas_kernels import dispatch
from pallas_kernels.dispatch import UnsupportedError
from pallas_kernels.fused_linear import Norm, fused_linear, is_fused
from pallas_kernels.fused_linear.triton import (
    NUM_SMS,
    SHARED_BYTES,
    choose_config,
    fused_linear_triton,
)
from pallas_kernels.rms_norm import rms_norm
from specjax.device.models.layers.linear import linear

EPS = 0.1
NORMS, ENDS = (None, "plain", "centred"), (None, "gated", "residual")
ROWS, SIZES = (
    (5, 1, 8, 16),
    ((200, 72), (520, 24), (128, 128)),
)  # not multiples of the tiles, but one
# Rows and sizes in turn, so that every norm and every end meets several.
CASES = [
    (*case, ROWS[i % len(ROWS)], SIZES[i % len(SIZES)])
    for i, case in enumerate(itertools.product(NORMS, ENDS, ("float32", "bfloat16")))
]


def arguments(norm, end, dtype, num_rows=5, sizes=(200, 72), seed=0):
    """x, weight, norm's weight or None, residual or None."""
    rng, (depth, columns) = np.random.default_rng(seed), sizes
    x = 3 * rng.normal(size=(num_rows, depth))
    weight = rng.normal(size=(depth, columns * (1 + (end == "gated")))) / np.sqrt(depth)
    scale = rng.uniform(-0.5, 0.5, size=depth) + (norm == "plain")
    residual = rng.normal(size=(num_rows, columns))
    given = x, weight, scale if norm else None, residual if end == "residual" else None
    return jax.tree.map(lambda one: one.astype(jnp.dtype(dtype)), given)


@functools.partial(jax.jit, static_argnames=("norm", "end", "kernels"))
def compiled(x, weight, scale, residual, *, norm, end, kernels):
    return fused_linear(
        x,
        weight,
        norm=Norm(scale, EPS, norm == "centred") if norm else None,
        is_gated=end == "gated",
        residual=residual,
        kernels=kernels,
    )


@pytest.fixture(params=["reference", "interpret"])
def kernels(request):
    return request.param


def by_definition(x, weight, scale, residual, *, norm, end):
    x, weight, scale, residual = (
        None if one is None else one.astype(np.float64) for one in (x, weight, scale, residual)
    )
    if norm:
        x = x / np.sqrt((x * x).mean(-1, keepdims=True) + EPS) * (scale + (norm == "centred"))
    y = x @ weight
    if end == "gated":
        gate, up = np.split(y, 2, axis=1)
        y = gate / (1 + np.exp(-gate)) * up
    return y if residual is None else residual + y


@pytest.mark.parametrize("norm, end, dtype, num_rows, sizes", CASES)
def test_matches_the_equations(norm, end, dtype, num_rows, sizes, kernels):
    inputs = arguments(norm, end, dtype, num_rows, sizes)
    out = compiled(*inputs, norm=norm, end=end, kernels=kernels)
    expected = by_definition(*inputs, norm=norm, end=end)
    assert out.dtype == dtype and out.shape == expected.shape
    # The reference rounds to bfloat16 after each operation.
    tolerance = 2e-5 if dtype == "float32" else 2**-6 * (1 if norm else 3)
    np.testing.assert_allclose(np.asarray(out, float), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.every_jax
def test_the_kernel_rounds_less_than_the_reference():
    """Only x times the norm's weight, and the result."""
    case = {"norm": "centred", "end": "gated"}
    inputs = arguments(*case.values(), "bfloat16", 16, (520, 72))
    expected = by_definition(*inputs, **case)
    errors = [
        np.linalg.norm(np.asarray(compiled(*inputs, **case, kernels=kernels), float) - expected)
        for kernels in ("interpret", "reference")
    ]
    assert errors[0] < 0.9 * errors[1]


@pytest.mark.every_jax
def test_sums_of_bf16_are_f32(kernels):
    """A term that bf16 sums would lose, 1 beside 512, is left where the large ones cancel."""
    x = np.zeros((5, 300), jnp.bfloat16)
    x[:, [0, 140, 299]] = 512, 1, -512
    weight = np.ones((300, 48), jnp.bfloat16)
    out = compiled(x, weight, None, None, norm=None, end=None, kernels=kernels)
    np.testing.assert_array_equal(np.asarray(out, np.float32), 1.0)


@pytest.mark.parametrize("norm, end", [("plain", "gated"), (None, "residual")])
def test_nan_in_a_row_stays_there(norm, end, kernels):
    inputs = arguments(norm, end, "float32")
    expected = by_definition(*inputs, norm=norm, end=end)
    inputs[0][3, 7] = expected[3] = np.nan
    out = compiled(*inputs, norm=norm, end=end, kernels=kernels)
    np.testing.assert_allclose(out, expected, rtol=2e-5, atol=2e-5)


def test_large_rows_do_not_overflow(kernels):
    """Where their product with the norm's weight, before they are normed, is large."""
    x, weight, scale, _ = arguments("plain", None, "bfloat16")
    scale = (1000 * scale).astype(scale.dtype)
    case = {"norm": "plain", "end": None}
    out = compiled((1e15 * x).astype(x.dtype), weight, scale, None, **case, kernels=kernels)
    expected = by_definition(x, weight, scale, None, **case)
    np.testing.assert_allclose(np.asarray(out, float), expected, rtol=0.05, atol=30)


@pytest.mark.optimized
def test_bits_of_a_row_depend_neither_on_the_others_nor_on_their_number():
    """Of the kernel: XLA sums in another order for another number of rows."""
    case = {"norm": "plain", "end": "gated", "kernels": "interpret"}
    x, *others = arguments("plain", "gated", "bfloat16", 8)
    out = np.asarray(compiled(x, *others, **case))
    np.testing.assert_array_equal(compiled(x[2:5], *others, **case), out[2:5])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_reference_is_what_models_do_elsewhere(dtype):
    """Bit by bit, operation by operation."""
    x, weight, scale, _ = arguments("centred", "gated", dtype)
    gate, up = jnp.split(linear(rms_norm(x, scale, EPS, True), weight), 2, axis=1)
    norm = Norm(scale, EPS, True)
    out = fused_linear(x, weight, norm=norm, is_gated=True, kernels="reference")
    np.testing.assert_array_equal(out, jax.nn.silu(gate) * up)
    x, weight, _, residual = arguments(None, "residual", dtype)
    out = fused_linear(x, weight, residual=residual, kernels="reference")
    np.testing.assert_array_equal(out, residual + linear(x, weight))


@pytest.mark.parametrize(
    "name, changes",
    [
        ("x", {"x": (5, 24, 1)}),
        ("x", {"x": (5, 23)}),
        ("x", {"weight": (24,)}),
        ("weight", {"weight": (24, 39), "is_gated": True}),
        ("residual", {"residual": (5, 20), "is_gated": True}),
        ("residual", {"residual": (5, 24)}),
        ("residual", {"residual": (40,)}),
        (r"norm\.weight", {"norm": (23,)}),
        (r"norm\.weight", {"norm": (24, 1)}),
    ],
)
def test_shapes_that_do_not_fit_are_named(name, changes):
    shapes = {"x": (5, 24), "weight": (24, 40), "norm": (24,), "residual": None} | changes
    is_gated = shapes.pop("is_gated", False)
    given = {name: shape and np.zeros(shape, np.float32) for name, shape in shapes.items()}
    given["norm"] = Norm(given["norm"], EPS, False)
    with pytest.raises(ValueError, match=f"^{name} must be"):
        fused_linear(**given, is_gated=is_gated)


def test_what_the_kernel_does_not_take_is_named():
    x, weight, _, residual = arguments(None, "residual", "float32", 17)
    with pytest.raises(UnsupportedError, match="x must be 16 rows at most; got 17"):
        fused_linear(x, weight, kernels="interpret")
    for dtypes in [
        ("float16", "float16", "float16"),
        ("bfloat16", "float32", "float32"),
        ("float32", "float32", "int8"),
    ]:
        few = (x[:5], weight, residual[:5])
        x_, weight_, added = (one.astype(d) for one, d in zip(few, dtypes, strict=True))
        with pytest.raises(UnsupportedError, match="must share a dtype of bfloat16, float32; got"):
            fused_linear_triton(x_, weight_, residual=added, interpret=True)


def test_no_rows():
    x, weight, _, _ = arguments(None, None, "float32", 0)
    assert fused_linear(x, weight, kernels="interpret").shape == (0, 72)


def test_where_it_is_worth_it():
    def rows(num_rows, dtype="bfloat16"):
        return jax.ShapeDtypeStruct((num_rows, 64), dtype)

    for num_rows in 1, 16:
        assert is_fused(rows(num_rows), 3072, "interpret")
        assert is_fused(rows(num_rows, "float32"), 2048, "interpret")
    assert not is_fused(rows(17), 2048, "interpret")
    assert not is_fused(rows(1), 4096, "interpret")
    assert not is_fused(rows(1, "float16"), 2048, "interpret")
    for kernels in "reference", "auto":  # on a CPU
        assert not is_fused(rows(1), 2048, kernels)


@pytest.mark.parametrize(
    "capability, has_room",
    [((8, 0), False), ((8, 9), False), ((9, 0), True), ((10, 0), True), ((12, 0), False)],
)
def test_only_where_the_tiles_fit_into_shared_memory(capability, has_room, monkeypatch):
    for module in dispatch, fused:
        monkeypatch.setattr(module, "compute_capability", lambda: capability)
    rows = jax.ShapeDtypeStruct((8, 64), "bfloat16")
    assert is_fused(rows, 2048, "auto") == has_room


@pytest.mark.parametrize("depth", [16, 2048, 14336])
@pytest.mark.parametrize("width", [32, 2048, 2560, 3072, 6144, 12352, 28672])
@pytest.mark.parametrize("is_gated", [False, True])
def test_tiles_fill_the_gpu_and_run_at_once(depth, width, is_gated):
    num_columns = width // (1 + is_gated)
    config = choose_config(depth, num_columns, is_gated, True, "bfloat16")
    programs = -(-num_columns // config.block_columns)
    assert programs > 0.85 * NUM_SMS or config.block_columns == 16
    # Numbers of 2 bytes: of the weight, x and the norm's weight, in the loop's buffers.
    numbers = config.block_columns * (1 + is_gated) + 16 + 1
    buffers = config.num_stages - 1
    shared = 2 * numbers * config.block_depth * config.num_tiles * buffers
    assert buffers >= 2 and shared * -(-programs // NUM_SMS) <= SHARED_BYTES
