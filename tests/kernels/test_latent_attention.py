"""Every implementation of attention over latents, compared with the published equation.

The oracle computes keys and values of every head from the latents, in f64. So it also shows that
the absorbed form, which does not compute them, is equivalent.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.kernels_paged_attention import LAYER, Case, paged

from pallas_kernels.latent_attention import latent_attention, latent_attention_triton
from pallas_kernels.latent_attention.triton import LatentTuning
from specjax.device.cache.latent_prompt import attend_plainly
from specjax.device.cache.pages import Pages
from specjax.device.cache.rows import CachedRows
from specjax.device.weights.latent_up import LatentUp

pytestmark = pytest.mark.slow

RANK, ROTATED, NOPE, VALUE, PAGE_SIZE = 64, 16, 36, 20, 16
SCALE = 0.21
# Requests and heads. A page that is not full, one that is, a request without rows, more rows than a
# tile has, and a context of more pages than a block has, but not twice as many.
CASES = {
    "decode": (Case((0, 16, 70, 200), (1, 1, 0, 1), 1), 3),
    "verify": (Case((5, 31, 250, 0), (4, 2, 4, 0), 4), 5),
    "chunk": (Case((0, 40), (24, 17), 24), 4),
    "blocks": (Case((0, 16), (40, 48), 48, table_columns=4), 4),
}

# One program for all of a context; the kernel's own choice for so few requests is to split it.
WHOLE = LatentTuning(block_rows=16, block_tokens=32, num_splits=1, num_warps=4, num_stages=1)
IMPLEMENTATIONS = {
    "reference": functools.partial(latent_attention, kernels="reference"),
    "interpret": functools.partial(latent_attention, kernels="interpret"),
    "whole": functools.partial(latent_attention_triton, config=WHOLE, interpret=True),
}


@functools.cache
def made(name):
    """Return q_nope, q_rotated, W_uk, W_uv, pool, page_table and positions.

    Entries that no row may read are NaN.
    """
    case, num_heads = CASES[name]
    rng = np.random.default_rng(len(name))
    pool, table, positions = paged(case, rng, RANK + ROTATED)
    rows = (*positions.shape, num_heads)
    return (
        rng.normal(size=(*rows, NOPE)),
        rng.normal(size=(*rows, ROTATED)),
        rng.normal(size=(num_heads, NOPE, RANK)) * RANK**-0.5,
        rng.normal(size=(num_heads, VALUE, RANK)) * RANK**-0.5,
        pool,
        table,
        positions,
    )


def attention_by_definition(q_nope, q_rotated, key_up, value_up, pool, table, positions):
    """Compute attention with keys and values of heads, one row and head at a time."""
    out = np.zeros((*q_nope.shape[:3], VALUE))
    for b, t in np.argwhere(positions >= 0):
        places = np.arange(positions[b, t] + 1)
        entries = pool[LAYER, table[b, places // PAGE_SIZE], places % PAGE_SIZE].astype(np.float64)
        latents, rotated = entries[:, :RANK], entries[:, RANK:]
        for h in range(q_nope.shape[2]):
            keys = np.concatenate([latents @ key_up[h].T, rotated], axis=1)
            query = np.concatenate([q_nope[b, t, h], q_rotated[b, t, h]])
            weights = np.exp(SCALE * (keys @ query - (keys @ query).max()))
            out[b, t, h] = weights @ (latents @ value_up[h].T) / weights.sum()
    return out


@functools.cache
def jitted(name):
    options = {"rank": RANK, "scale": SCALE}
    return jax.jit(functools.partial(IMPLEMENTATIONS[name], **options))


def attend(name, arguments, dtype="float32"):
    q_nope, q_rotated, key_up, _, pool, table, positions = arguments
    absorbed = np.einsum("bthd,hdr->bthr", q_nope, key_up)
    q = np.concatenate([absorbed, q_rotated], axis=-1).astype(jnp.dtype(dtype))
    return jitted(name)(q, pool.astype(q.dtype), np.int32(LAYER), table, positions)


@pytest.mark.parametrize(
    "case, implementation",
    [*itertools.product(CASES, ("reference", "interpret")), ("verify", "whole")],
)
def test_the_absorbed_form_is_the_plain_one(case, implementation):
    arguments = made(case)
    mixed = np.asarray(attend(implementation, arguments), np.float64)
    out = np.einsum("bthr,hdr->bthd", mixed, arguments[3])
    np.testing.assert_allclose(out, attention_by_definition(*arguments), rtol=0, atol=2e-5)


@pytest.mark.parametrize("implementation", ["reference", "interpret"])
def test_bf16_and_bits_that_do_not_depend_on_other_requests(implementation):
    arguments = made("verify")
    mixed = np.asarray(attend(implementation, arguments, "bfloat16"), np.float64)
    out = np.einsum("bthr,hdr->bthd", mixed, arguments[3])
    np.testing.assert_allclose(out, attention_by_definition(*arguments), rtol=0, atol=0.1)
    order = np.array([1, 3, 0, 2])
    moved = [x if i in (2, 3, 4) else x[order] for i, x in enumerate(arguments)]
    again = np.asarray(attend(implementation, moved, "bfloat16"), np.float64)
    np.testing.assert_array_equal(again, mixed[order])


@pytest.mark.parametrize("kernels", ["reference", "interpret"])
@pytest.mark.parametrize("case", ["chunk", "blocks"])
def test_the_plain_form_of_chunks(case, kernels):
    """Keys and values of heads are computed block by block.

    One request ends before the last block.
    """
    nope, rotated, key_up, value_up, pool, table, positions = made(case)
    rows = CachedRows(positions.reshape(-1), table, folds=True, kernels=kernels)
    up = np.concatenate([key_up, value_up], axis=1).reshape(-1, RANK).astype(np.float32)
    up = LatentUp(up, *key_up.shape[:2])
    queries = (x.reshape(-1, *x.shape[2:]).astype(np.float32) for x in (nope, rotated))
    out = jax.jit(attend_plainly)(
        rows, Pages(pool), np.int32(LAYER), *queries, up, np.float32(SCALE)
    )
    expected = attention_by_definition(*made(case))
    np.testing.assert_allclose(out.reshape(expected.shape), expected, rtol=0, atol=1e-5)
