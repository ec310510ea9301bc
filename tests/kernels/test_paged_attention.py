"""Every implementation of paged attention against its equation, evaluated in numpy in f64."""

from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.dispatch import UnsupportedError
from pallas_kernels.paged_attention import paged_attention
from pallas_kernels.paged_attention.triton import paged_attention_triton
from pallas_kernels.paged_attention.tuning import (
    LEAST_BLOCKS,
    NUM_SMS,
    TuningConfig,
    choose_config,
)

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
    table_columns: int | None = None  # None: one more than the longest request has pages
    dtype: str = "float32"
    window: int | None = None
    soft_cap: float | None = None
    is_fp8: bool = False  # the pool
    seed: int = 0

    @property
    def lengths(self):
        return [start + count for start, count in zip(self.starts, self.counts, strict=True)]

    @property
    def num_columns(self):
        return self.table_columns or -(-max(self.lengths) // self.page_size) + 1


BORDERS = (1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 255, 256, 257)  # pages and blocks end here
CASES = {
    **{
        f"rows{t}": Case((0, 37, 90), (t, t - 1, max(1, t // 2)), t, group=2 ** (t % 4), seed=t)
        for t in (1, 2, 4, 5, 7, 9, 16)  # all groups; 16 and 32 rows to a block, 1 and 2 blocks
    },
    **{f"group{g}": Case((60, 5), (4, 4), 4, group=g, num_kv_heads=3) for g in (1, 2, 4, 8)},
    **{
        f"page{p}-dim{d}": Case((200, 3, 131), (3, 4, 1), 4, dim=d, page_size=p)
        for p, d in ((16, 128), (32, 64), (32, 128), (128, 128))
    },
    "borders": Case(tuple(n - 1 for n in BORDERS), (1,) * len(BORDERS), 1),
    "borders-k3": Case(tuple(max(0, n - 4) for n in BORDERS), (4,) * len(BORDERS), 4),
    "chunk": Case((0,), (130,), 130),
    "chunks": Case((0, 128, 64), (64, 1, 33), 64, page_size=32),
    "idle": Case((10, 70, 30), (0, 2, 0), 2),
    "all-idle": Case((10, 70), (0, 0), 1),
    "full-table": Case((317, 60), (3, 3), 3, table_columns=20),
    "dim256": Case((100, 47), (3, 1), 3, group=6, dim=256),
    "window": Case((0, 37, 200, 90), (4, 4, 4, 0), 4, window=20),
    "window-of-one": Case((70, 300), (3, 2), 3, window=1),
    "window-longer-than-all": Case((0, 90), (4, 3), 4, window=1000),
    "window-chunk": Case((64, 0), (150, 90), 150, window=50),
    "soft-cap": Case((70, 3), (4, 2), 4, soft_cap=0.5),
    "soft-cap-window": Case((70, 3), (4, 2), 4, soft_cap=2.0, window=33),
}
FP8 = Case((70, 129), (4, 2), 4, is_fp8=True)
# Tiles of many sizes, for any case: splits without a block, blocks of rows without a row.
CONFIGS = {
    "one-split": TuningConfig(64, 64, 1, 4, 1),
    "small-tiles": TuningConfig(16, 16, 3, 4, 1),
    "more-splits-than-blocks": TuningConfig(32, 128, 7, 4, 1),
}


@pytest.fixture(
    params=["reference", "interpret", pytest.param("triton", marks=pytest.mark.gpu)],
)
def attend(request):
    """One implementation, compiled."""

    def run(*arguments, **options):
        return paged_attention(*arguments, **options, kernels=request.param)

    return jax.jit(run, static_argnames=("window", "soft_cap"))


def arguments(case):
    """q, kv, layer, page_table, positions; NaN in every key and value that no row may see."""
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
        oldest = max(0, case.starts[b] - case.window + 1) if case.window else 0
        for column in range(-(-length // case.page_size)):
            page_table[b, column] = page = free.pop()
            start = column * case.page_size
            seen = slice(max(0, oldest - start), length - start if count else 0)
            kv[LAYER, page, seen] = rng.normal(size=kv[LAYER, page, seen].shape)
    row = np.arange(case.num_rows)[None]
    starts, counts = np.array(case.starts)[:, None], np.array(case.counts)[:, None]
    positions = np.where(row < counts, starts + row, -1).astype(np.int32)
    num_heads = case.num_kv_heads * case.group
    q = rng.normal(size=(batch, case.num_rows, num_heads, case.dim))
    return (
        jnp.asarray(q, dtype),
        jnp.asarray(kv, jnp.float8_e4m3fn if case.is_fp8 else dtype),
        jnp.int32(LAYER),
        jnp.asarray(page_table),
        jnp.asarray(positions),
    )


def options(case):
    """window, soft_cap and kv_scale, those that the case has."""
    found = {"window": case.window, "soft_cap": case.soft_cap, "kv_scale": None}
    if case.is_fp8:
        scale = np.random.default_rng(case.seed).uniform(0.5, 2.0, (2, case.num_kv_heads))
        found["kv_scale"] = jnp.asarray(scale, jnp.float32)
    return {name: value for name, value in found.items() if value is not None}


def context(pool, page_table, position, window):
    """Keys and values [n, H_kv, D] in f64 of the tokens that a row at `position` attends to."""
    page_size = pool.shape[1]
    tokens = [
        pool[page_table[j // page_size], j % page_size]
        for j in range(
            max(0, position - window + 1), min(position + 1, len(page_table) * page_size)
        )
        if page_table[j // page_size] >= 0
    ]
    return np.stack(tokens).astype(np.float64).transpose(1, 0, 2, 3)


def attention_by_definition(
    q, kv, layer, page_table, positions, *, window=10**6, soft_cap=None, kv_scale=None
):
    """The equation, one row and head at a time."""
    q, page_table, positions = (np.asarray(x) for x in (q, page_table, positions))
    pool = np.asarray(kv[layer].astype(jnp.float32), np.float64)
    if kv_scale is not None:
        pool = pool * np.asarray(kv_scale)[:, :, None]
    out = np.zeros(q.shape, np.float64)
    group = q.shape[2] // pool.shape[3]
    for b, t in np.argwhere(positions >= 0):
        keys, values = context(pool, page_table[b], positions[b, t], window)
        for h in range(q.shape[2]):
            scores = keys[:, h // group] @ q[b, t, h].astype(np.float64) / np.sqrt(q.shape[3])
            if soft_cap is not None:
                scores = soft_cap * np.tanh(scores / soft_cap)
            weights = np.exp(scores - scores.max())
            out[b, t, h] = weights @ values[:, h // group] / weights.sum()
    return out


def assert_matches_the_equation(out, inputs, chosen):
    expected = attention_by_definition(*inputs, **chosen)
    np.testing.assert_allclose(out, expected, rtol=2e-5, atol=2e-5 * np.abs(expected).max())


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


ON_EVERY_JAX = "group8", "soft-cap-window"  # the others differ in shapes


@pytest.mark.parametrize(
    "name",
    [pytest.param(x, marks=pytest.mark.every_jax if x in ON_EVERY_JAX else ()) for x in CASES],
)
def test_matches_the_equation(attend, name):
    inputs, chosen = arguments(CASES[name]), options(CASES[name])
    assert_matches_the_equation(attend(*inputs, **chosen), inputs, chosen)


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("name", ["borders-k3", "group8", "window-chunk"])
def test_any_tiles_match_the_equation(name, config):
    inputs, chosen = arguments(CASES[name]), options(CASES[name])
    attend = jax.jit(
        partial(paged_attention_triton, config=CONFIGS[config], interpret=True),
        static_argnames=("window", "soft_cap"),
    )
    assert_matches_the_equation(attend(*inputs, **chosen), inputs, chosen)


@pytest.mark.parametrize(
    "name, dtype", [("rows5", "float32"), ("idle", "bfloat16"), ("all-idle", "float32")]
)
def test_padding_rows_are_exactly_zero(attend, name, dtype):
    q, *rest = arguments(replace(CASES[name], dtype=dtype))
    out = attend(q, *rest)
    assert out.dtype == q.dtype
    padding = np.asarray(rest[-1]) < 0
    assert padding.any()
    np.testing.assert_array_equal(np.asarray(out.astype(jnp.float32))[padding], 0)


def test_float8_matches_the_equation():
    inputs, chosen = arguments(FP8), options(FP8)
    assert_matches_the_equation(paged_attention(*inputs, **chosen), inputs, chosen)


@pytest.mark.parametrize("name", ["rows4", "group8", "page32-dim128", "borders", "fp8"])
def test_bf16_is_no_worse_than_plain_bf16(attend, name):
    case = replace(CASES.get(name, FP8), dtype="bfloat16")
    (q, kv, *rest), chosen = arguments(case), options(case)
    expected = attention_by_definition(q.astype(jnp.float32), kv, *rest, **chosen)
    scale = chosen.get("kv_scale", jnp.ones((2, 1)))[:, :, None]
    plain = attention_in_storage_dtype(q, (kv.astype(jnp.float32) * scale).astype(q.dtype), *rest)
    real = np.asarray(rest[-1]) >= 0

    def error(out):
        return np.sqrt(np.mean((np.asarray(out.astype(jnp.float32)) - expected)[real] ** 2))

    assert 0 < error(attend(q, kv, *rest, **chosen)) <= 1.5 * error(plain)


def test_rows_past_the_assigned_pages_see_only_what_exists(attend):
    """Drafts may stand past a request's last page; their rows are not used but must be finite."""
    q, kv, layer, page_table, _ = arguments(Case((28, 16), (4, 16), 8))
    positions = jnp.asarray(np.array([[28], [28]]) + np.arange(8), jnp.int32)
    page_table = page_table.at[:, 2:].set(-1)
    inputs = q, kv, layer, page_table, positions
    np.testing.assert_allclose(attend(*inputs), attention_by_definition(*inputs), atol=2e-5)


def test_positions_past_the_table_read_all_of_it(attend):
    q, kv, layer, page_table, _ = arguments(Case((24,), (8,), 2, table_columns=2))
    inputs = q, kv, layer, page_table, jnp.asarray([[40, 41]], jnp.int32)
    np.testing.assert_allclose(attend(*inputs), attention_by_definition(*inputs), atol=2e-5)


def test_requests_may_share_pages(attend):
    q, kv, layer, page_table, positions = arguments(Case((70, 70, 70), (3, 3, 3), 3))
    shared = jnp.broadcast_to(page_table[:1, :4], (3, 4))
    inputs = q, kv, layer, page_table.at[:, :4].set(shared), positions
    np.testing.assert_allclose(attend(*inputs), attention_by_definition(*inputs), atol=2e-5)


@pytest.mark.optimized
@pytest.mark.parametrize("num_rows, dtype", [(1, "bfloat16"), (7, "float32"), (7, "bfloat16")])
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


@pytest.mark.optimized
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bits_of_a_row_do_not_depend_on_the_other_rows(attend, dtype):
    """A token gets the same wherever it stands in its rows, and whatever stands behind it."""
    q, kv, layer, page_table, _ = arguments(Case((125, 126), (8, 8), 8, dtype=dtype))
    page_table = page_table[:1].repeat(2, axis=0)
    positions = 125 + jnp.arange(8)[None].repeat(2, axis=0)
    expected = attend(q, kv, layer, page_table, positions)[0].astype(jnp.float32)
    for start, count in (0, 3), (2, 6), (5, 1):
        moved = jnp.roll(q, -start, axis=1)
        rows = jnp.where(jnp.arange(8) < count, positions + start, -1)
        out = attend(moved, kv, layer, page_table, rows)[0].astype(jnp.float32)
        np.testing.assert_array_equal(out[:count], expected[start : start + count])


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
    with pytest.raises(ValueError, match="paged_attention has no such implementation; it has tri"):
        paged_attention(*inputs, kernels="mosaic")


@pytest.mark.parametrize(
    "message, changes",
    [
        ("window must be at least 1", {"window": 0}),
        ("soft_cap must be positive", {"soft_cap": 0.0}),
        ("kv_scale is for a pool of float8_e4m3fn", {"kv_scale": jnp.ones((2, 2))}),
    ],
)
def test_options_that_make_no_sense_are_named(message, changes):
    with pytest.raises(ValueError, match=message):
        paged_attention(*arguments(Case((0,), (1,), 1)), **changes)


def test_a_pool_of_float8_needs_its_scales():
    inputs = arguments(Case((0,), (1,), 1, is_fp8=True))
    with pytest.raises(ValueError, match="kv_scale is missing"):
        paged_attention(*inputs)
    with pytest.raises(ValueError, match=r"kv_scale must be \[2, H_kv=2\]; got \(2, 3\)"):
        paged_attention(*inputs, kv_scale=jnp.ones((2, 3)))


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
        jnp.zeros((1, 1, num_heads, dim), q_dtype),
        jnp.zeros((1, 2, page_size, 2, 2, dim), kv_dtype),
        jnp.int32(0),
        jnp.zeros((1, 2), jnp.int32),
        jnp.zeros((1, 1), jnp.int32),
    )
    with pytest.raises(UnsupportedError, match=message):
        paged_attention(*inputs, kernels="interpret")
    assert np.isfinite(paged_attention(*inputs, kernels="reference")).all()


def test_a_pool_that_pallas_would_index_wrongly_is_refused():
    shapes = (
        jax.ShapeDtypeStruct((1, 1, 8, 128), jnp.bfloat16),
        jax.ShapeDtypeStruct((32, 3 * 2**11, 16, 2, 4, 128), jnp.float8_e4m3fn),
        jax.ShapeDtypeStruct((), jnp.int32),
        jax.ShapeDtypeStruct((1, 8), jnp.int32),
        jax.ShapeDtypeStruct((1, 1), jnp.int32),
    )
    attend = partial(paged_attention, kv_scale=jnp.ones((2, 4)), kernels="interpret")
    with pytest.raises(UnsupportedError, match=r"kv of 3.0 GiB in float8_e4m3fn"):
        jax.eval_shape(attend, *shapes)


@pytest.mark.parametrize("num_kv_heads, dim", [(8, 128), (4, 256), (1, 64)])
@pytest.mark.parametrize("context", [64, 2048, 131_072])
def test_programs_fill_the_device_where_the_context_has_the_blocks(num_kv_heads, dim, context):
    for batch in 1, 2, 7, 16, 24, 64, 256:
        for num_rows in 1, 4, 16, 512:
            num_heads = num_kv_heads * 4
            config = choose_config(
                batch, num_rows, num_heads, num_kv_heads, dim, context, jnp.dtype("bfloat16")
            )
            blocks = -(-4 * num_rows // config.block_rows)
            programs = batch * num_kv_heads * blocks * config.num_splits
            assert 1 <= config.num_splits <= 64
            # A last wave of few programs, or too short a context, is all that leaves SMs idle.
            most = max(1, min(64, context // config.block_tokens // LEAST_BLOCKS))
            assert programs >= NUM_SMS // 2 or config.num_splits >= most
            assert programs <= 2 * NUM_SMS or config.num_splits == 1
