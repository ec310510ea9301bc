"""The grouped product in plain JAX: one product per block of rows of the same group."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

BLOCK_ROWS = 8


def grouped_matmul_reference(
    x: jax.Array,
    weights: jax.Array,
    group_sizes: jax.Array,
    sources: jax.Array | None = None,
    targets: jax.Array | None = None,
) -> jax.Array:
    """Compute `grouped_matmul` in plain JAX.

    Each used matrix is read once per block of rows, and no unused matrix is read. The result is
    differentiable with respect to x and the weights.
    """
    return from_to(sources, targets, x, lambda x: _products(x, weights, group_sizes))


def from_to(
    sources: jax.Array | None,
    targets: jax.Array | None,
    x: jax.Array,
    products: Callable[[jax.Array], jax.Array],
) -> jax.Array:
    """Gather the rows x[sources], call `products`, and scatter its result.

    `products` is a function that takes rows sorted by group, and returns the rows' products. The
    n-th product becomes row targets[n] of the result. If `sources` is None, the rows of x are
    already sorted. If `targets` is None, the products are not moved.
    """
    out = products(x if sources is None else x[sources])
    if targets is None:
        return out
    return jnp.zeros_like(out).at[targets].set(out, unique_indices=True)


@jax.custom_vjp
def _products(x: jax.Array, weights: jax.Array, group_sizes: jax.Array) -> jax.Array:
    """Return the products [N, F] of rows that are sorted by group."""

    def multiply(rows: jax.Array, group: jax.Array) -> jax.Array:
        return jnp.matmul(rows, weights[group], preferred_element_type=jnp.float32)

    return products_of_blocks(x, group_sizes, weights.shape[2], multiply)


def products_of_blocks(
    x: jax.Array,
    group_sizes: jax.Array,
    num_columns: int,
    multiply: Callable[[jax.Array, jax.Array], jax.Array],
) -> jax.Array:
    """Return the products [N, num_columns] of rows that are sorted by group.

    `multiply` takes a block of rows and their group i32[], and returns their products f32.
    """
    rows = _padded(x)

    def add(block: _Block, out: jax.Array) -> jax.Array:
        product = multiply(_slice(rows, block), block.group)
        # The next group's first block overwrites rows past this group's end.
        return jax.lax.dynamic_update_slice_in_dim(out, product.astype(x.dtype), block.start, 0)

    out = jnp.zeros((len(rows), num_columns), x.dtype)
    return _over_blocks(group_sizes, add, out)[: len(x)]


def _forward(x: jax.Array, weights: jax.Array, group_sizes: jax.Array) -> tuple[jax.Array, tuple]:
    return _products(x, weights, group_sizes), (x, weights, group_sizes)


def _backward(kept: tuple[jax.Array, jax.Array, jax.Array], gradient: jax.Array) -> tuple:
    x, weights, group_sizes = kept
    rows, gradients = _padded(x), _padded(gradient)

    def add(block: _Block, out: jax.Array) -> jax.Array:
        is_own = jnp.arange(BLOCK_ROWS)[:, None] < block.num_own
        own = jnp.where(is_own, _slice(rows, block), 0)
        product = jnp.matmul(own.T, _slice(gradients, block), preferred_element_type=jnp.float32)
        return out.at[block.group].add(product)

    by_weights = _over_blocks(group_sizes, add, jnp.zeros(weights.shape, jnp.float32))
    by_x = _products(gradient, weights.swapaxes(1, 2), group_sizes)
    return by_x, by_weights.astype(weights.dtype), None


_products.defvjp(_forward, _backward)


class _Block(NamedTuple):
    """A block of `BLOCK_ROWS` consecutive rows, which starts with rows of `group`.

    The last block of a group extends past the group's end, into later groups or padding.
    """

    group: jax.Array  # i32[]
    start: jax.Array  # i32[], the first row
    num_own: jax.Array  # i32[], number of rows from `start` to the end of the group


def _over_blocks(
    group_sizes: jax.Array, add: Callable[[_Block, jax.Array], jax.Array], out: jax.Array
) -> jax.Array:
    """Return `out` after setting `out = add(block, out)` for every block, in the order of rows."""
    ends = jnp.cumsum(group_sizes)
    num_blocks = -(-group_sizes // BLOCK_ROWS)
    block_ends = jnp.cumsum(num_blocks)

    def body(i: jax.Array, out: jax.Array) -> jax.Array:
        group = jnp.searchsorted(block_ends, i, side="right")
        within = i - (block_ends[group] - num_blocks[group])
        start = ends[group] - group_sizes[group] + within * BLOCK_ROWS
        return add(_Block(group, start, ends[group] - start), out)

    return jax.lax.fori_loop(0, block_ends[-1], body, out)


def _slice(rows: jax.Array, block: _Block) -> jax.Array:
    return jax.lax.dynamic_slice_in_dim(rows, block.start, BLOCK_ROWS)


def _padded(x: jax.Array) -> jax.Array:
    return jnp.pad(x, ((0, BLOCK_ROWS), (0, 0)))
