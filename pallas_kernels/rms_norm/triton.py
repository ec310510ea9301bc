"""A Triton kernel for the residual sum and the norm, with one program per row."""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.dispatch import UnsupportedError
from pallas_kernels.triton_call import load, store, triton_call

MAX_DIM = 16384  # a row must fit in the registers of one program
ELEMENTS_PER_WARP = 256  # 16 bytes per load, and short code, because a step has few rows


def add_rms_norm_triton(
    x: jax.Array,
    delta: jax.Array,
    weight: jax.Array,
    eps: float,
    is_centred: bool,
    *,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """See `add_rms_norm`.

    Raises:
        UnsupportedError: D is above `MAX_DIM`.
    """
    num_rows, dim = x.shape
    if dim > MAX_DIM:
        raise UnsupportedError(f"x has rows of D={dim}; at most {MAX_DIM} are supported")
    block = pl.next_power_of_2(dim)
    kernel = functools.partial(
        _kernel,
        dim=dim,
        block=block,
        eps=eps,
        is_centred=is_centred,
    )
    like = jax.ShapeDtypeStruct(x.shape, x.dtype)
    num_warps = min(16, max(1, block // ELEMENTS_PER_WARP))
    y, normed = triton_call(
        kernel,
        [x, delta, weight],
        [like, like],
        name="add_rms_norm",
        grid=(num_rows,),
        num_warps=num_warps,
        interpret=interpret,
    )
    return y, normed


def _kernel(x_ref, delta_ref, weight_ref, y_ref, out_ref, *, dim, block, eps, is_centred):
    row, i = pl.program_id(0), jnp.arange(block, dtype=jnp.int32)
    mask = i < dim

    def read(ref, *index):
        return load(ref.at[(*index, i)], mask=mask, other=0.0).astype(jnp.float32)

    # Load the weight before computing the sum, which waits for the row: other work of the step has
    # evicted the weight from all caches.
    weight = read(weight_ref)
    rounded = (read(x_ref, row) + read(delta_ref, row)).astype(y_ref.dtype)
    store(y_ref.at[row, i], rounded, mask=mask)
    y = rounded.astype(jnp.float32)
    y = y * jax.lax.rsqrt(jnp.sum(y * y) / dim + eps)
    if is_centred:
        out = y * (1.0 + weight)
    else:
        out = y.astype(out_ref.dtype).astype(jnp.float32) * weight
    store(out_ref.at[row, i], out.astype(out_ref.dtype), mask=mask)
