"""Every implementation of the gated delta rule against its equations, token by token in f64."""

import numpy as np
import pytest
from support.kernels_delta_rule import (
    LAYER,
    PROMPT_WIDTH,
    RINGS,
    STEP_WIDTH,
    Serving,
    Sizes,
    Streams,
    error,
)

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
    _, rings, *others = serving.of_requests()
    for row, (ring, length) in enumerate(zip(rings, serving.length, strict=True)):
        expected = np.full_like(ring, np.nan)
        for at in range(length - 3, length):
            x = serving.streams.x[row, at, : expected.shape[1]]
            expected[at % len(expected)] = x if at >= 0 else 0
        np.testing.assert_array_equal(ring, expected)
    assert all(np.isnan(x).all() for x in others)


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
def test_a_step_reads_and_writes_no_columns_but_its_own(implementation, sizes):
    """On a GPU programs run in any order: one may have written the new tokens' columns before
    another reads. So what a step writes it must not look at, but for u, which has one owner.

    What it should not read is NaN, in all rings at once. Steps are of all lengths, the rings come
    round several times, and the most that may be pending is.
    """
    sizes, prompt_width = SIZES[sizes]
    width = sizes.most_rows
    most_columns = max(sizes.taps - 1 + width, 2 * width)
    serving = implementation.serve(Streams.random(sizes, 1, 5 * most_columns), sizes)
    serving.prompt(2, width=prompt_width)
    rng, seen = np.random.default_rng(sizes.taps), set()
    while serving.length[0] < 4 * most_columns:
        count = rng.choice([width, width, 2, 1])
        pending, start = serving.pending[0], serving.length[0]
        fork, poisoned = serving.fork(), serving.fork()
        read = {}
        for name, ring in zip(RINGS, serving.rings, strict=True):
            num_read, num_columns = sizes.taps - 1 if name == "ring" else pending, ring.shape[1]
            read[name] = {place % num_columns for place in range(start - num_read, start)}
            poisoned.poison(name, sorted({*range(num_columns)} - read[name]))
        before = poisoned.rings
        for one in fork, poisoned:
            one.step([count], [count], width=width)
        np.testing.assert_array_equal(poisoned.out, fork.out)
        np.testing.assert_array_equal(poisoned.states, fork.states)
        for name, old, new in zip(RINGS, before, poisoned.rings, strict=True):
            num_columns = old.shape[1]
            is_same = (old == new) | (np.isnan(old) & np.isnan(new))
            written = {column for _, column in np.argwhere(~is_same.all(axis=2))}
            assert written == {place % num_columns for place in range(start, start + count)}
            assert name == "u" or not written & read[name]
        serving.step([count], [rng.choice([1, count])], width=width)
        seen.add((pending, count))
    assert (width, width) in seen


@pytest.mark.parametrize(
    "implementation",
    ["reference", pytest.param("interpret", marks=pytest.mark.slow)],
    indirect=True,
)
def test_errors_do_not_grow_over_hundreds_of_steps(implementation):
    """A folded correction comes from a step that may have verified others before it."""
    rng, num_steps = np.random.default_rng(0), 600
    accepted = rng.integers(1, STEP_WIDTH + 1, num_steps)
    streams = Streams.random(Sizes(), 1, accepted.sum() + 1)
    serving = implementation.serve(streams)
    for stands in accepted:
        serving.step([STEP_WIDTH], [stands])
    serving.step([1], [1])
    serving.check()
    assert error(serving.states[0], streams.truth[1][0, accepted.sum()]) < 1e-6


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
