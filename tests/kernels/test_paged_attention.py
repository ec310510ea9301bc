"""Every implementation of paged attention, compared with its equation in f64."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.kernels_paged_attention import (
    Case,
    arguments,
    attention_by_definition,
    compiled,
    options,
)

from pallas_kernels.paged_attention.triton import paged_attention_triton
from pallas_kernels.paged_attention.tuning import (
    MIN_BLOCKS,
    NUM_SMS,
    AttentionTuning,
    choose_config,
)

BORDERS = (1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 255, 256, 257)  # pages and blocks end here
# 32 rows of a key head, which fill their block; some rows are padding, one request is idle, and
# one has the whole table. The tests below change starts and counts, which compiles nothing.
VERIFY = Case(
    (*(max(0, n - 4) for n in BORDERS), 60, 5, 10, 37, 317),
    (*[4] * len(BORDERS), 4, 1, 0, 2, 3),
    4,
    group=8,
    num_kv_heads=3,
    table_columns=20,
)
CASES = {
    "decode": Case((*(n - 1 for n in BORDERS), 37, 70), (*[1] * len(BORDERS), 1, 0), 1),
    "verify": VERIFY,
    "page32-dim128-soft-cap": Case(
        (200, 3, 131), (3, 4, 1), 4, dim=128, page_size=32, soft_cap=0.5
    ),
    "page128-dim256-window-longer-than-all": Case(
        (100, 47, 200), (3, 1, 2), 3, group=6, dim=256, page_size=128, window=1000
    ),
    "chunks-page32": Case((0, 128, 64), (130, 1, 33), 130, page_size=32),  # many blocks of rows
    "window-rows16": Case((0, 37, 200, 90), (16, 4, 15, 0), 16, group=1, window=20),
    "window-block": Case((20, 37, 200, 90, 5), (4, 4, 3, 1, 0), 4, window=20, is_block=True),
    "sinks": Case((700, 3, 131), (3, 4, 1), 4, has_sinks=True),  # split
    "sinks-window": Case((300, 0, 70), (16, 3, 0), 16, group=4, window=40, has_sinks=True),
    "window-of-one": Case((70, 300), (3, 2), 3, window=1),
    "window-chunk-soft-cap": Case((64, 0), (150, 90), 150, window=50, soft_cap=2.0),
}
FP8 = "float8_e4m3fn"
# In bf16 a CPU takes long for large pools.
VERIFY_FEW = replace(
    VERIFY, starts=(0, 12, 37, 60, 125, 10), counts=(4, 4, 3, 1, 4, 0), table_columns=9
)
# Tiles of many sizes, for any case: splits without a block, blocks of rows without a row.
CONFIGS = {
    "one-split": AttentionTuning(64, 64, 1, 4, 1),
    "small-tiles": AttentionTuning(16, 16, 3, 4, 1),
    "more-splits-than-blocks": AttentionTuning(32, 128, 7, 4, 1),
}
ON_EVERY_JAX = "verify", "window-of-one", "window-chunk-soft-cap"


@pytest.fixture(
    params=["reference", "interpret", pytest.param("triton", marks=pytest.mark.gpu)],
)
def attend(request):
    """A compiled implementation."""
    return compiled(request.param)


def assert_matches_the_equation(out, inputs, chosen):
    expected = attention_by_definition(*inputs, **chosen)
    np.testing.assert_allclose(out, expected, rtol=2e-5, atol=2e-5 * np.abs(expected).max())


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.every_jax if n in ON_EVERY_JAX else ()) for n in CASES],
)
def test_matches_the_equation(attend, name):
    case = CASES[name]
    inputs, chosen = arguments(case), options(case)
    assert_matches_the_equation(attend(*inputs, **chosen), inputs, chosen)


# A window that only the longest requests outgrow: of others, every block is added.
WINDOW = replace(
    VERIFY,
    starts=(0, 12, 60, 125, 253, 10),
    counts=(4, 3, 1, 4, 4, 0),
    table_columns=17,
    window=200,
    is_block=True,
)


@pytest.mark.slow
@pytest.mark.parametrize("config", CONFIGS)
def test_any_tiles_match_the_equation(config):
    inputs, chosen = arguments(WINDOW), options(WINDOW)
    attend = jax.jit(
        partial(paged_attention_triton, config=CONFIGS[config], interpret=True),
        static_argnames=("window", "soft_cap"),
    )
    assert_matches_the_equation(attend(*inputs, **chosen), inputs, chosen)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", [VERIFY, replace(VERIFY_FEW, dtype="bfloat16")], ids=["float32", "bfloat16"]
)
def test_padding_rows_are_exactly_zero(attend, case):
    """Padding rows of busy requests, of idle requests, and a batch of only padding rows."""
    *inputs, positions = arguments(case)
    for at in positions, np.full_like(positions, -1):
        out = np.asarray(attend(*inputs, at))
        assert out.dtype == inputs[0].dtype
        assert (at < 0).any()
        np.testing.assert_array_equal(out[at < 0].astype(np.float32), 0)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case, rounding",
    [
        (Case((70, 129), (4, 2), 4, pool=FP8), 2e-5),
        (Case((20, 5), (2, 1), 2, dim=32, page_size=8, dtype="float16"), 2**-9),
        (Case((20, 50), (2, 1), 2, dim=96, page_size=48, pool="bfloat16"), 2e-5),
        (Case((20, 5), (2, 1), 2, dtype="bfloat16", pool="float32"), 2**-6),
    ],
    ids=["f32-of-fp8", "dim32-page8-f16", "dim96-page48-f32-of-bf16", "bf16-of-f32"],
)
def test_auto_takes_what_the_kernel_does_not(case, rounding):
    inputs, chosen = arguments(case), options(case)
    out, expected = compiled("auto")(*inputs, **chosen), attention_by_definition(*inputs, **chosen)
    atol = rounding * max(1, np.abs(expected).max())
    np.testing.assert_allclose(np.asarray(out, np.float64), expected, rtol=0, atol=atol)


@pytest.mark.slow
@pytest.mark.parametrize("pool", [None, FP8, "int8"])
def test_bf16_is_better_than_plain_bf16(attend, pool):
    """Plain bf16, which also rounds products and weights, has an error of .0029."""
    case = replace(VERIFY_FEW, dtype="bfloat16", pool=pool)
    inputs, chosen = arguments(case), options(case)
    expected = attention_by_definition(*inputs, **chosen)
    error = np.asarray(attend(*inputs, **chosen), np.float64) - expected
    assert 0 < np.sqrt((error**2).mean() / (expected**2).mean()) < 0.0025


@pytest.mark.slow
@pytest.mark.parametrize("start, count", [(28, 4), (316, 4), (70, 3)])
def test_rows_past_the_pages_and_pages_that_are_shared(attend, start, count):
    """Drafts may lie past a request's pages (32 tokens), or past the page table (320 tokens).

    Their rows are not used, but must be finite. In a third case, all requests share pages.
    """
    batch = len(VERIFY.starts)
    case = replace(VERIFY, starts=(start,) * batch, counts=(count,) * batch)
    q, kv, layer, page_table, positions = arguments(case)
    if count == 3:
        page_table[1:] = page_table[0]
    else:
        positions = positions + np.arange(batch, dtype=np.int32)[:, None]
    inputs = q, kv, layer, page_table, positions
    np.testing.assert_allclose(attend(*inputs), attention_by_definition(*inputs), atol=2e-5)


@pytest.mark.optimized
@pytest.mark.parametrize("num_rows, dtype", [(1, "bfloat16"), (8, "float32"), (8, "bfloat16")])
def test_bits_depend_on_neither_neighbours_nor_other_rows(attend, num_rows, dtype):
    """A request's bits do not depend on its place in the batch, or on other requests.

    A token's bits do not depend on its row, or on later rows.
    """
    long = Case((70, 300, 290, 5), (num_rows,) * 4, num_rows, dtype=dtype)
    q, kv, layer, page_table, positions = arguments(long)

    def bits(q, page_table, positions):
        return np.asarray(attend(q, kv, layer, page_table, positions), np.float32)

    expected = bits(q, page_table, positions)
    for others in 0, 100, -1:
        moved = positions.copy()
        moved[1:3] = others + np.arange(num_rows) if others >= 0 else -1
        np.testing.assert_array_equal(bits(q, page_table, moved)[[0, 3]], expected[[0, 3]])
    order = np.array([3, 1, 0, 2])
    out = bits(q[order], page_table[order], positions[order])
    np.testing.assert_array_equal(out, expected[order])
    for start, count in [(0, 3), (2, 6), (5, 1)] if num_rows > 1 else []:
        rows = np.where(np.arange(num_rows) < count, positions + start, -1).astype(np.int32)
        out = bits(np.roll(q, -start, axis=1), page_table, rows)
        np.testing.assert_array_equal(out[:, :count], expected[:, start : start + count])


# --- the tiles that it chooses --------------------------------------------------------------------

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "gpu.jsonl"
HEADS = {"Llama-8B": (32, 8, 128), "Qwen-27B": (24, 4, 256)}


@pytest.mark.parametrize("model", HEADS)
def test_no_tiles_were_faster_for_a_full_batch(model):
    """Of the tile sizes measured on a GPU, none is faster than the chosen one."""
    lines = map(json.loads, RESULTS.read_text().splitlines())
    times = {
        line["config"].partition("(")[2]: line["device_us"]
        for line in lines
        if line.get("what") == "paged_attention tiles" and line.get("device_us")
        if (line["model"], line["batch"], line["rows"], line["context"]) == (model, 64, 4, 4096)
    }
    chosen = choose_config(64, 4, *HEADS[model], 4096, jnp.dtype("bfloat16"))
    assert len(times) > 3
    assert times[str(chosen).partition("(")[2]] == min(times.values())


@pytest.mark.slow
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
            most = max(1, min(64, context // config.block_tokens // MIN_BLOCKS))
            assert programs >= NUM_SMS // 2 or config.num_splits >= most
            assert programs <= 2 * NUM_SMS or config.num_splits == 1
