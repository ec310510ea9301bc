"""Every implementation of paged attention against its equation, evaluated in numpy in f64."""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.paged_attention import IMPLEMENTATIONS, paged_attention

LAYER, NUM_LAYERS = 1, 2


@dataclass(frozen=True)
class Case:
    """Request b has starts[b] tokens in the pool and counts[b] new ones; T rows for each."""

    starts: tuple[int, ...]
    counts: tuple[int, ...]
    num_rows: int
    group: int = 2
    num_kv_heads: int = 2
    dim: int = 64
    page_size: int = 16
    num_columns: int = 20  # of the page table
    dtype: str = "float32"
    seed: int = 0

    @property
    def lengths(self):
        return [start + count for start, count in zip(self.starts, self.counts, strict=True)]


BORDERS = (1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 255, 256, 257)  # pages and blocks end here
CASES = {
    **{
        f"rows{t}": Case((0, 37, 90), (t, t - 1, max(1, t // 2)), t, group=2 ** (t % 4), seed=t)
        for t in range(1, 17)
    },
    **{f"group{g}": Case((60, 5), (4, 4), 4, group=g, num_kv_heads=3) for g in (1, 2, 4, 8)},
    **{
        f"page{p}-dim{d}": Case((200, 3, 131), (3, 4, 1), 4, dim=d, page_size=p)
        for p in (16, 32, 128)
        for d in (64, 128)
    },
    "borders": Case(tuple(n - 1 for n in BORDERS), (1,) * len(BORDERS), 1),
    "borders-k3": Case(tuple(max(0, n - 4) for n in BORDERS), (4,) * len(BORDERS), 4),
    "chunk": Case((0,), (130,), 130),
    "chunks": Case((0, 128, 64), (64, 1, 33), 64, page_size=32),
    "idle": Case((10, 70, 30), (0, 2, 0), 2),
    "all-idle": Case((10, 70), (0, 0), 1),
    "full-table": Case((317, 60), (3, 3), 3),
}


@pytest.fixture(params=IMPLEMENTATIONS)
def attend(request):
    """One implementation, compiled."""

    def run(*arguments):
        return paged_attention(*arguments, kernels=request.param)

    return jax.jit(run)


def arguments(case):
    """q, kv, layer, page_table, positions; NaN in every key and value that no row may use."""
    rng = np.random.default_rng(case.seed)
    batch, pages_per_seq = len(case.starts), case.num_columns
    dtype = jnp.dtype(case.dtype)
    kv = np.full(
        (NUM_LAYERS, batch * pages_per_seq + 3, case.page_size, 2, case.num_kv_heads, case.dim),
        np.nan,
        np.float32,
    )
    page_table = np.full((batch, pages_per_seq), -1, np.int32)
    free = rng.permutation(kv.shape[1]).tolist()
    for b, (length, count) in enumerate(zip(case.lengths, case.counts, strict=True)):
        for column in range(-(-length // case.page_size)):
            page_table[b, column] = page = free.pop()
            used = min(case.page_size, length - column * case.page_size) if count else 0
            kv[LAYER, page, :used] = rng.normal(size=kv[LAYER, page, :used].shape)
    row = np.arange(case.num_rows)[None]
    starts, counts = np.array(case.starts)[:, None], np.array(case.counts)[:, None]
    positions = np.where(row < counts, starts + row, -1).astype(np.int32)
    num_heads = case.num_kv_heads * case.group
    q = rng.normal(size=(batch, case.num_rows, num_heads, case.dim))
    return (
        jnp.asarray(q, dtype),
        jnp.asarray(kv, dtype),
        jnp.int32(LAYER),
        jnp.asarray(page_table),
        jnp.asarray(positions),
    )


def context(pool, page_table, position):
    """Keys and values [n, H_kv, D] in f64 of the tokens that a row at `position` attends to."""
    page_size = pool.shape[1]
    tokens = [
        pool[page_table[j // page_size], j % page_size]
        for j in range(min(position + 1, len(page_table) * page_size))
        if page_table[j // page_size] >= 0
    ]
    return np.stack(tokens).astype(np.float64).transpose(1, 0, 2, 3)


def attention_by_definition(q, kv, layer, page_table, positions):
    """The equation, one row and head at a time."""
    q, page_table, positions = (np.asarray(x) for x in (q, page_table, positions))
    pool = np.asarray(kv[layer].astype(jnp.float32))
    out = np.zeros(q.shape, np.float64)
    group = q.shape[2] // pool.shape[3]
    for b, t in np.argwhere(positions >= 0):
        keys, values = context(pool, page_table[b], positions[b, t])
        for h in range(q.shape[2]):
            scores = keys[:, h // group] @ q[b, t, h].astype(np.float64) / np.sqrt(q.shape[3])
            weights = np.exp(scores - scores.max())
            out[b, t, h] = weights @ values[:, h // group] / weights.sum()
    return out


@jax.jit
def attention_in_storage_dtype(q, kv, layer, page_table, positions):
    """The plain way in the pool's own dtype: gather all pages, mask, softmax, two products."""
    batch, _, num_heads, dim = q.shape
    tokens = kv[layer, jnp.maximum(page_table, 0)].reshape(batch, -1, 2, kv.shape[4], dim)
    tokens = jnp.where(jnp.isnan(tokens), 0, tokens)
    keys, values = jnp.repeat(tokens, num_heads // kv.shape[4], axis=3).swapaxes(0, 2)
    scores = jnp.einsum("bthd,cbhd->bhtc", q, keys) * jnp.asarray(dim**-0.5, q.dtype)
    visible = jnp.arange(keys.shape[0]) <= positions[:, None, :, None]
    weights = jax.nn.softmax(jnp.where(visible, scores, -jnp.inf), axis=-1)
    return jnp.einsum("bhtc,cbhd->bthd", weights, values)


@pytest.mark.parametrize("name", CASES)
def test_matches_the_equation(attend, name):
    inputs = arguments(CASES[name])
    out, expected = np.asarray(attend(*inputs)), attention_by_definition(*inputs)
    np.testing.assert_allclose(out, expected, rtol=2e-5, atol=2e-5 * np.abs(expected).max())


@pytest.mark.parametrize("name", ["rows5", "idle", "all-idle"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_padding_rows_are_exactly_zero(attend, name, dtype):
    q, *rest = arguments(replace(CASES[name], dtype=dtype))
    out = attend(q, *rest)
    assert out.dtype == q.dtype
    padding = np.asarray(rest[-1]) < 0
    assert padding.any()
    np.testing.assert_array_equal(np.asarray(out.astype(jnp.float32))[padding], 0)


@pytest.mark.parametrize("name", ["rows4", "group8", "page32-dim128", "borders"])
def test_bf16_is_no_worse_than_plain_bf16(attend, name):
    inputs = arguments(replace(CASES[name], dtype="bfloat16"))
    expected = attention_by_definition(inputs[0].astype(jnp.float32), *inputs[1:])
    real = np.asarray(inputs[-1]) >= 0

    def error(out):
        return np.sqrt(np.mean((np.asarray(out.astype(jnp.float32)) - expected)[real] ** 2))

    assert 0 < error(attend(*inputs)) <= 1.5 * error(attention_in_storage_dtype(*inputs))


def test_rows_past_the_assigned_pages_see_only_what_exists(attend):
    """Drafts may stand past a request's last page; their rows are not used but must be finite."""
    q, kv, layer, page_table, _ = arguments(Case((28, 16), (4, 16), 8))
    positions = jnp.asarray(np.array([[28], [28]]) + np.arange(8), jnp.int32)
    page_table = page_table.at[:, 2:].set(-1)
    inputs = q, kv, layer, page_table, positions
    np.testing.assert_allclose(attend(*inputs), attention_by_definition(*inputs), atol=2e-5)


def test_positions_past_the_table_read_all_of_it(attend):
    q, kv, layer, page_table, _ = arguments(Case((24,), (8,), 2, num_columns=2))
    inputs = q, kv, layer, page_table, jnp.asarray([[40, 41]], jnp.int32)
    np.testing.assert_allclose(attend(*inputs), attention_by_definition(*inputs), atol=2e-5)


def test_requests_may_share_pages(attend):
    q, kv, layer, page_table, positions = arguments(Case((70, 70, 70), (3, 3, 3), 3))
    shared = jnp.broadcast_to(page_table[:1, :4], (3, 4))
    inputs = q, kv, layer, page_table.at[:, :4].set(shared), positions
    np.testing.assert_allclose(attend(*inputs), attention_by_definition(*inputs), atol=2e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("num_rows", [1, 4, 7])
def test_bits_do_not_depend_on_the_neighbours(attend, num_rows, dtype):
    """The same request beside short, long and idle ones, in any place of the batch."""
    long = Case((70, 300, 290, 5), (num_rows,) * 4, num_rows, dtype=dtype)
    q, kv, layer, page_table, positions = arguments(long)
    expected = np.asarray(attend(q, kv, layer, page_table, positions).astype(jnp.float32))
    for others in 0, 100, -1:
        moved = positions.at[1:3].set(others + jnp.arange(num_rows) if others >= 0 else -1)
        out = attend(q, kv, layer, page_table, moved).astype(jnp.float32)
        np.testing.assert_array_equal(out[0], expected[0])
        np.testing.assert_array_equal(out[3], expected[3])
    order = jnp.array([3, 1, 0, 2])
    out = attend(q[order], kv, layer, page_table[order], positions[order])
    np.testing.assert_array_equal(out.astype(jnp.float32), expected[order])


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
    q, kv = jnp.zeros(shapes["q"]), jnp.zeros(shapes["kv"])
    page_table, positions = (jnp.zeros(shapes[n], int) for n in ("page_table", "positions"))
    with pytest.raises(ValueError, match=f"^{name} must be"):
        paged_attention(q, kv, jnp.int32(0), page_table, positions)


def test_kernels_that_do_not_exist_are_named():
    inputs = arguments(Case((0,), (1,), 1))
    with pytest.raises(ValueError, match="kernels='cuda' is unknown; choose one of auto"):
        paged_attention(*inputs, kernels="cuda")
    with pytest.raises(ValueError, match="paged_attention has no such implementation; it has ref"):
        paged_attention(*inputs, kernels="mosaic")
