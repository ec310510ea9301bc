"""Every implementation of rotation and page write, compared with a loop in f64."""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.rope_write import HeadWeights, rope_write

NUM_LAYERS, NUM_PAGES, NUM_COLUMNS, EPS = 2, 24, 5, 1e-5
# Of the values written, which are sums of two products: bf16 rounds angles and norms on the way.
TOLERANCE = {"float32": 2e-5, "bfloat16": 2e-2}


compiled = jax.jit(
    rope_write, static_argnames=("num_heads", "eps", "is_centred", "writes", "kernels")
)


@dataclass(frozen=True)
class Case:
    """The rows of requests, and the heads of a model."""

    starts: tuple[int, ...] = (0, 15, 31, 17)
    counts: tuple[int, ...] = (3, 2, 1, 3)
    num_rows: int = 3
    num_heads: int = 4
    num_gates: int = 0
    num_kv_heads: int = 2
    dim: int = 64
    half: int = 32
    page_size: int = 16
    dtype: str = "float32"
    has_bias: bool = False
    has_norms: bool = False
    is_centred: bool = False
    unassigned: tuple[tuple[int, int], ...] = ()

    def arguments(self, seed=0):
        """Return the arguments of rope_write by position. The pool is full of numbers."""
        rng = np.random.default_rng(seed)
        batch, dtype = len(self.starts), jnp.dtype(self.dtype)
        kv = rng.normal(
            size=(NUM_LAYERS, NUM_PAGES, self.page_size, 2, self.num_kv_heads, self.dim)
        )
        table = rng.permutation(NUM_PAGES)[: batch * NUM_COLUMNS].reshape(batch, NUM_COLUMNS)
        for place in self.unassigned:
            table[place] = -1
        row = np.arange(self.num_rows)[None]
        positions = np.where(
            row < np.array(self.counts)[:, None], np.array(self.starts)[:, None] + row, -1
        )
        width = (self.num_heads + self.num_gates + 2 * self.num_kv_heads) * self.dim
        qkv = rng.normal(size=(batch, self.num_rows, width)).astype(dtype)
        weights = HeadWeights(
            rng.normal(size=width).astype(dtype) if self.has_bias else None,
            *(rng.normal(size=self.dim).astype(dtype) if self.has_norms else None for _ in "qk"),
        )
        frequency = 100.0 ** -(np.arange(self.half) / self.half)
        angle = np.maximum(positions, 0)[..., None] * frequency
        angles = tuple(turn(angle).astype(np.float32) for turn in (np.cos, np.sin))
        return (
            qkv,
            weights,
            angles,
            kv.astype(dtype),
            np.int32(1),
            table.astype(np.int32),
            positions.astype(np.int32),
        )

    def run(self, kernels, arguments, **options):
        """Run a compiled implementation."""
        return compiled(
            *arguments,
            num_heads=self.num_heads,
            eps=EPS,
            is_centred=self.is_centred,
            kernels=kernels,
            **options,
        )

    def by_definition(self, qkv, weights, angles, kv, layer, table, positions):
        """Return q [B, T, H, D], the pool, and which of its entries are written."""
        as_f64 = (None if x is None else np.asarray(x, np.float64) for x in (qkv, *weights))
        x, bias, q_norm, k_norm = as_f64
        x = x if bias is None else x + bias
        heads = x.reshape(*positions.shape, -1, self.dim)
        cos, sin = (np.asarray(a, np.float64)[:, :, None] for a in angles)

        def turned(y, norm):
            if norm is not None:
                y = y / np.sqrt((y * y).mean(-1, keepdims=True) + EPS) * (norm + self.is_centred)
            first, second, rest = np.split(y, [self.half, 2 * self.half], axis=-1)
            turn = first * cos - second * sin, second * cos + first * sin
            return np.concatenate([*turn, rest], axis=-1)

        q = turned(heads[:, :, : self.num_heads], q_norm)
        k = turned(heads[:, :, -2 * self.num_kv_heads : -self.num_kv_heads], k_norm)
        v, pool = heads[:, :, -self.num_kv_heads :], kv.astype(np.float64)
        is_written = np.zeros(kv.shape[:3], bool)
        for b, t in np.argwhere(positions >= 0):
            column, offset = divmod(positions[b, t], self.page_size)
            if column < NUM_COLUMNS and table[b, column] >= 0:
                place = layer, table[b, column], offset
                pool[place], is_written[place] = (k[b, t], v[b, t]), True
        return q, pool, is_written


def check(case, kernels):
    """Compare with the definition; return the number of written entries."""
    arguments = case.arguments()
    q, kv, _ = case.run(kernels, arguments)
    wanted_q, pool, is_written = case.by_definition(*arguments)
    real = arguments[6] >= 0
    assert q.dtype == kv.dtype == arguments[3].dtype
    atol = TOLERANCE[case.dtype] * np.abs(wanted_q).max(initial=1.0)
    q, kv = np.asarray(q, np.float64), np.asarray(kv, np.float64)
    np.testing.assert_allclose(q[real], wanted_q[real], atol=atol, rtol=0)
    np.testing.assert_allclose(kv[is_written], pool[is_written], atol=atol, rtol=0)
    np.testing.assert_array_equal(kv[~is_written], pool[~is_written])
    if not case.has_bias:  # values have neither norm nor rotation
        np.testing.assert_array_equal(kv[:, :, :, 1], pool[:, :, :, 1])
    return is_written.sum()


PLAIN = Case()
NORMED = Case(has_norms=True, num_heads=16, num_kv_heads=8, dim=16, half=8, dtype="bfloat16")
CASES = [
    PLAIN,
    NORMED,  # four blocks of heads
    # A block and a half of heads.
    Case(has_bias=True, num_heads=6, num_kv_heads=3, dim=32, half=16, dtype="bfloat16"),
    Case(num_heads=0, has_bias=True, has_norms=True, dim=32, half=16),  # keys and values alone
    # Half as many gates as queries do not exist, but nothing depends on their number.
    Case(has_norms=True, is_centred=True, num_gates=4, half=8, has_bias=True),
    Case((3,), (1,), 1, num_heads=8, num_kv_heads=1, dim=256, page_size=32, has_norms=True),
    replace(  # a chunk
        NORMED, starts=(0, 30), counts=(40, 11), num_rows=40, num_gates=2, half=4, is_centred=True
    ),
]


@pytest.mark.slow
@pytest.mark.every_jax
@pytest.mark.parametrize("case", CASES)
def test_matches_the_equation(case, kernels):
    assert check(case, kernels)


def test_what_writes_nothing(kernels):
    """Cases: an unassigned page, positions past the table, and a step without rows."""
    case = replace(PLAIN, starts=(14, 78, 200, 8), counts=(3, 3, 3, 0), unassigned=((0, 1),))
    # Positions 14, 15 of the first and 78, 79 of the second.
    assert check(case, kernels) == 4
    assert check(replace(PLAIN, counts=(0, 0, 0, 0)), kernels) == 0


@pytest.mark.optimized
def test_without_writes_the_queries_are_the_same_and_the_pool_stays(kernels):
    case = Case(has_norms=True)
    arguments = case.arguments()
    q, *_ = case.run(kernels, arguments)
    same, kv, _ = case.run(kernels, arguments, writes=False)
    np.testing.assert_array_equal(np.asarray(kv), np.asarray(arguments[3]))
    np.testing.assert_array_equal(np.asarray(same), np.asarray(q))


def test_a_donated_pool_is_updated_in_place():
    qkv, weights, angles, kv, *rest = PLAIN.arguments()
    kv = jnp.array(kv)
    address = kv.unsafe_buffer_pointer()

    def call(kv):
        return rope_write(
            qkv, weights, angles, kv, *rest, num_heads=4, eps=EPS, kernels="reference"
        )

    _, out, _ = jax.jit(call, donate_argnums=0)(kv)
    assert kv.is_deleted() and out.unsafe_buffer_pointer() == address
