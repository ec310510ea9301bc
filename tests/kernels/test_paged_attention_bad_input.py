"""What paged attention says of arguments that it does not take, and who takes them."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.kernels_paged_attention import Case, arguments, attention_by_definition, compiled

from pallas_kernels.dispatch import UnsupportedError
from pallas_kernels.paged_attention import paged_attention


@pytest.mark.parametrize(
    "name, shapes",
    [
        ("q", {"q": (2, 3, 64)}),
        ("q", {"positions": (2, 4)}),
        ("q", {"positions": (6,)}),
        ("kv", {"kv": (8, 16, 2, 2, 64)}),
        ("kv", {"kv": (2, 8, 16, 3, 2, 64)}),
        ("kv", {"kv": (2, 8, 16, 2, 2, 32)}),
        ("kv", {"kv": (2, 8, 16, 2, 3, 64)}),
        ("page_table", {"page_table": (3, 5)}),
        ("page_table", {"page_table": (2,)}),
    ],
)
def test_shapes_that_do_not_fit_are_named(name, shapes):
    fitting = {
        "q": (2, 3, 4, 64),
        "kv": (2, 8, 16, 2, 2, 64),
        "page_table": (2, 5),
        "positions": (2, 3),
    }
    shapes = fitting | shapes
    q, kv = np.zeros(shapes["q"], np.float32), np.zeros(shapes["kv"], np.float32)
    page_table, positions = (np.zeros(shapes[n], np.int32) for n in ("page_table", "positions"))
    with pytest.raises(ValueError, match=f"^{name} must be"):
        paged_attention(q, kv, np.int32(0), page_table, positions)


def test_kernels_that_do_not_exist_are_named():
    inputs = arguments(Case((0,), (1,), 1))
    with pytest.raises(ValueError, match="kernels='cuda' is unknown; choose one of auto"):
        paged_attention(*inputs, kernels="cuda")
    with pytest.raises(ValueError, match="paged_attention has no such implementation; it has tri"):
        paged_attention(*inputs, kernels="mosaic")


@pytest.mark.parametrize(
    "message, changes",
    [
        ("window must be at least 1", {"window": 0}),
        ("origins need a window", {"origins": np.zeros((1, 1), np.int32)}),
        (r"got \(2, 1\) with", {"origins": np.zeros((2, 1), np.int32), "window": 3}),
        ("soft_cap must be positive", {"soft_cap": 0.0}),
        ("kv_scale is for a pool of float8_e4m3fn", {"kv_scale": np.ones((2, 2))}),
    ],
)
def test_options_that_make_no_sense_are_named(message, changes):
    with pytest.raises(ValueError, match=message):
        paged_attention(*arguments(Case((0,), (1,), 1)), **changes)


def test_a_pool_of_float8_needs_its_scales():
    inputs = arguments(Case((0,), (1,), 1, pool="float8_e4m3fn"))
    with pytest.raises(ValueError, match="kv_scale is missing"):
        paged_attention(*inputs)
    with pytest.raises(ValueError, match=r"kv_scale must be \[2, H_kv=2\]; got \(2, 3\)"):
        paged_attention(*inputs, kv_scale=np.ones((2, 3)))


@pytest.mark.parametrize(
    "message, q, kv",
    [
        ("head dimension D 32: .* takes 64, 128, 256", (4, 32, "float32"), (16, 32, "float32")),
        ("head dimension D 96: ", (4, 96, "float32"), (16, 96, "float32")),
        ("page_size 8: .* takes 16, 32, 64, 128", (4, 64, "float32"), (8, 64, "float32")),
        ("page_size 48: ", (4, 64, "float32"), (48, 64, "float32")),
        ("dtype of q float16: .* takes bf", (4, 64, "float16"), (16, 64, "float16")),
        (
            "dtype of kv with q in bfloat16: float32: .* takes bfloat16, float8_e4m3fn",
            (4, 64, "bfloat16"),
            (16, 64, "float32"),
        ),
        (
            "dtype of kv with q in float32: bfloat16: .* takes float32$",
            (4, 64, "float32"),
            (16, 64, "bfloat16"),
        ),
    ],
)
def test_what_the_kernel_does_not_take_is_named(message, q, kv):
    (num_heads, dim, q_dtype), (page_size, _, kv_dtype) = q, kv
    inputs = (
        np.zeros((1, 1, num_heads, dim), jnp.dtype(q_dtype)),
        np.zeros((1, 2, page_size, 2, 2, dim), jnp.dtype(kv_dtype)),
        np.int32(0),
        np.zeros((1, 2), np.int32),
        np.zeros((1, 1), np.int32),
    )
    with pytest.raises(UnsupportedError, match=message):
        paged_attention(*inputs, kernels="interpret")


@pytest.mark.parametrize(
    "case, rounding",
    [
        (Case((20, 5), (2, 1), 2, dim=32, page_size=8, dtype="float16"), 2**-9),
        (Case((20, 50), (2, 1), 2, dim=96, page_size=48, pool="bfloat16"), 2e-5),
        (Case((20, 5), (2, 1), 2, dtype="bfloat16", pool="float32"), 2**-6),
    ],
    ids=["dim32-page8-f16", "dim96-page48-f32-of-bf16", "bf16-of-f32"],
)
def test_the_reference_takes_what_the_kernel_does_not(case, rounding):
    inputs = arguments(case)
    out, expected = compiled("reference")(*inputs), attention_by_definition(*inputs)
    np.testing.assert_allclose(np.asarray(out, np.float64), expected, rtol=0, atol=rounding)


def test_a_pool_that_pallas_would_index_wrongly_is_refused():
    shapes = (
        jax.ShapeDtypeStruct((1, 1, 8, 128), jnp.bfloat16),
        jax.ShapeDtypeStruct((32, 3 * 2**11, 16, 2, 4, 128), jnp.float8_e4m3fn),
        jax.ShapeDtypeStruct((), jnp.int32),
        jax.ShapeDtypeStruct((1, 8), jnp.int32),
        jax.ShapeDtypeStruct((1, 1), jnp.int32),
    )
    attend = partial(paged_attention, kv_scale=np.ones((2, 4), np.float32), kernels="interpret")
    with pytest.raises(UnsupportedError, match=r"kv of 3.0 GiB in float8_e4m3fn"):
        jax.eval_shape(attend, *shapes)
