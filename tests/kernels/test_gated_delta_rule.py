"""Every implementation of the gated delta rule against its equations, token by token in f64."""

import jax.numpy as jnp
import numpy as np
import pytest
from support.kernels_delta_rule import LAYER, PROMPT_WIDTH, STEP_WIDTH, Serving, Sizes, Streams

from pallas_kernels.gated_delta_rule import Heads

PUBLISHED = Heads(1, 2, 128, 128)  # sizes of a head in published models

# What a kernel is compiled for, few programs with all of it, and the width of their prompts.
SIZES = {
    "default": (Sizes(), PROMPT_WIDTH),
    "ratio3-taps1-plain": (Sizes(Heads(2, 6, 32, 16), taps=1, most_rows=2, is_normed=False), 9),
    "published-bf16": (Sizes(PUBLISHED, dtype="bfloat16"), 30),  # two of the kernels' chunks
}
SLOW_SIZES = {
    "published": (Sizes(PUBLISHED), 30),
    "ratio1-taps2": (Sizes(Heads(2, 2, 16, 32), taps=2, most_rows=3), 9),
    "most-rows1": (Sizes(most_rows=1), 9),
    "plain-bf16": (Sizes(is_normed=False, dtype="bfloat16"), 9),
}


@pytest.mark.parametrize(
    "sizes", [*SIZES, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW_SIZES)]
)
def test_ragged_prompts_match_the_definition(implementation, sizes):
    sizes, width = (SIZES | SLOW_SIZES)[sizes]
    serving = implementation.serve(Streams.random(sizes, 3, 30), sizes)
    for counts in [(1, 3, 9), (2, 0, 1), (0, 0, 0), (9, 5, 0), (1, 1, 8), (5, 9, 7)]:
        serving.prompt(*counts, width=width)
        serving.check()
    assert serving.length.tolist() == [18, 18, 25]


# Of a whole chunk of the reference and of three of the kernels'; of a token more; of many.
WIDTHS = {
    PROMPT_WIDTH: Sizes(),
    1: Sizes(),
    65: Sizes(),
    200: Sizes(Heads(2, 2, 16, 32), taps=2, most_rows=1),
}
SLOW_WIDTHS = {"reference": [65], "interpret": [1, 65, 200]}


@pytest.mark.parametrize(
    "implementation, width",
    [
        pytest.param(kernels, width, marks=pytest.mark.slow if width in slow else ())
        for kernels, slow in SLOW_WIDTHS.items()
        for width in WIDTHS
    ],
    indirect=["implementation"],
)
def test_chunks_of_any_width_match_the_definition(implementation, width):
    sizes = WIDTHS[width]
    serving = implementation.serve(Streams.random(sizes, 3, 2 * width + 1), sizes)
    for counts in [(width, max(1, width - 2), 1), (width, 1, width)]:
        serving.prompt(*counts, width=width)
        serving.check()


def test_a_prompt_leaves_nothing_but_the_history_of_the_convolution(implementation):
    serving = implementation.serve(Streams.random(Sizes(), 3, 30))
    serving.step([4, 4, 4], [2, 4, 1])
    serving.prompt(9, 2, 1)
    _, rings, gates = serving.of_requests()
    for row, (ring, length) in enumerate(zip(rings, serving.length, strict=True)):
        expected = np.full_like(ring, np.nan)
        for at in range(length - 3, length):
            x = serving.streams.x[row, at, : expected.shape[1]]
            expected[at % len(expected)] = x if at >= 0 else 0
        np.testing.assert_array_equal(ring, expected)
        assert np.isnan(gates[row]).all()


@pytest.mark.every_jax
def test_what_is_pending_is_folded_before_a_chunk(implementation):
    serving = implementation.serve(Streams.random(Sizes(), 3, 30))
    serving.prompt(5, 1, 9)
    serving.step([4, 4, 1], [2, 4, 1])
    serving.prompt(7, 1, 0)
    serving.check()
    serving.step([1, 3, 4], [1, 2, 4])
    serving.check()


def test_a_request_may_begin_with_a_step(implementation):
    """A prompt of one token need not be told from a decoded one."""
    serving = implementation.serve(Streams.random(Sizes(), 3, 30))
    for counts, stands in ([1, 4, 3], [1, 4, 1]), ([4, 4, 4], [1, 2, 3]), ([1, 1, 1], [1, 1, 1]):
        serving.step(counts, stands)
        serving.check()


def test_no_other_slot_or_layer_is_read_or_written(implementation):
    """Which shows when they are full of NaN, and when they are not."""
    streams = Streams.random(Sizes(), 2, 30)
    runs = [implementation.serve(streams, slots=(3, 1), fill=fill) for fill in (np.nan, 7.0)]
    for serving in runs:
        serving.prompt(9, 2)
        serving.step([4, 4], [2, 4])
        serving.prompt(1, 0)
        serving.step([1, 4], [1, 1])
        serving.check()
    np.testing.assert_array_equal(runs[0].out, runs[1].out)
    for x in runs[1].cache:
        others = np.array(x, np.float32)
        others[LAYER, runs[1].slots] = 7.0
        assert (others == 7.0).all()


@pytest.mark.parametrize("sizes", ["default", "ratio3-taps1-plain"])
def test_a_step_writes_no_column_that_it_reads(implementation, sizes):
    """On a GPU the programs of heads that share a key head run in any order: one may have written
    the new tokens' columns before another reads. So whatever a call writes, it must not look at.

    Filling a column with NaN shows whether it is read: of requests that are the same, each has
    another one filled. Steps are of all lengths, the ring comes round several times, and the most
    that may be pending is.
    """
    sizes, prompt_width = SIZES[sizes]
    num_columns, num_rows, width = sizes.columns, 4, sizes.most_rows
    streams = Streams.random(sizes, 1, 5 * num_columns)
    same = Streams(streams.x.repeat(num_rows, axis=0), streams.weights, streams.heads)
    serving = implementation.serve(same, sizes)
    serving.prompt(*[2] * num_rows, width=prompt_width)
    rng, seen = np.random.default_rng(sizes.taps), set()
    while serving.length[0] < 4 * num_columns:
        count = rng.choice([width, width, 2, 1])
        counts = [count] * num_rows
        pending, start = serving.pending[0], serving.length[0]
        read = columns_read(serving, counts, width)
        fork = serving.fork()
        fork.step(counts, counts, width=width)
        before, after = (x.of_requests()[1] for x in (serving, fork))
        is_same = (before == after) | (np.isnan(before) & np.isnan(after))
        written = {column for _, column in np.argwhere(~is_same.all(axis=2))}
        serving.step(counts, [rng.choice([1, count])] * num_rows, width=width)
        window = range(max(0, start - pending - (sizes.taps - 1)), start)
        assert read == {place % num_columns for place in window}
        assert written == {place % num_columns for place in range(start, start + count)}
        assert not read & written
        seen.add((pending, count))
    assert (width, width) in seen


def columns_read(serving, counts, width):
    """Those of the ring in which NaN shows in what a step makes of requests that are the same."""
    num_columns, num_rows = serving.sizes.columns, len(counts)
    read = set()
    for first in range(0, num_columns, num_rows):
        filled = range(first, min(first + num_rows, num_columns))
        fork = serving.fork()
        fork.out[:] = 0.0
        state, ring, gates = (np.array(x) for x in fork.cache)
        for row, column in enumerate(filled):
            ring[LAYER, fork.slots[row], column] = np.nan
            gates[LAYER, fork.slots[row], column] = np.nan
        fork.cache = fork.cache._make(map(jnp.array, (state, ring, gates)))
        fork.step(counts, counts, width=width)
        for row, column in enumerate(filled):
            if np.isnan(fork.out[row]).any() or np.isnan(fork.states[row]).any():
                read.add(column)
    return read


@pytest.mark.parametrize(
    "sizes, width",
    [
        pytest.param("published-bf16", 4, marks=pytest.mark.every_jax),
        ("default", STEP_WIDTH),
        pytest.param("published", 4, marks=pytest.mark.slow),
    ],
)
def test_kernels_round_no_worse_than_the_reference(sizes, width):
    sizes, prompt_width = (SIZES | SLOW_SIZES)[sizes]
    streams = Streams.random(sizes, 1, 100)

    def errors(kernels):
        serving = Serving(kernels, streams, sizes)
        serving.step([4], [4], width=width)
        for _ in range(2):
            serving.prompt(30, width=prompt_width)
        for count, stands in [(4, 1), (1, 1), (4, 4), (4, 2), (2, 2), (4, 4)]:
            serving.step([count], [stands], width=width)
        length, folded = serving.length[0], serving.length[0] - serving.pending[0]
        truth = streams.truth[0][:, :length], streams.truth[1][:, folded]
        found = serving.out[:, :length], serving.states
        pairs = zip(found, truth, strict=True)
        return [np.sqrt(((x - y) ** 2).mean() / (y**2).mean()) for x, y in pairs]

    for ours, theirs in zip(errors("interpret"), errors("reference"), strict=True):
        assert ours < max(1.5 * theirs, 5e-7), (ours, theirs)
