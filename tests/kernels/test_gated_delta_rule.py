"""Every implementation of the gated delta rule against its equations, token by token in f64."""

import numpy as np
import pytest
from support.kernels_delta_rule import (
    LAYER,
    PROMPT_WIDTH,
    RINGS,
    STEP_WIDTH,
    TOLERANCE,
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


@pytest.mark.parametrize("sizes", SIZES)
def test_ragged_prompts_match_the_definition(kernels, sizes):
    sizes, width = SIZES[sizes]
    serving = Serving(kernels, Streams.random(sizes, 3, 30), sizes)
    for counts in [(1, 3, 9), (2, 0, 1), (0, 0, 0), (9, 5, 0), (1, 1, 8), (5, 9, 7)]:
        serving.prompt(*counts, width=width)
        serving.check()
    assert serving.length.tolist() == [18, 18, 25]


def chunks(kernels, widths, **options):
    return [pytest.param(kernels, width, **options) for width in widths]


@pytest.mark.parametrize(
    "kernels, width",
    [
        # Of a whole chunk of the reference and of three of the kernels'; of a token more; of many.
        *chunks("reference", (1, PROMPT_WIDTH, 65, 200)),
        *chunks("interpret", [PROMPT_WIDTH]),
        *chunks("interpret", (1, 65, 200), marks=pytest.mark.slow),
    ],
)
def test_chunks_of_any_width_match_the_definition(kernels, width):
    sizes = Sizes(Heads(2, 2, 16, 32), taps=2, most_rows=1) if width == 200 else Sizes()
    serving = Serving(kernels, Streams.random(sizes, 3, 2 * width + 1), sizes)
    for counts in [(width, max(1, width - 2), 1), (width, 1, width)]:
        serving.prompt(*counts, width=width)
        serving.check()


def test_a_prompt_leaves_nothing_but_the_history_of_the_convolution(kernels):
    serving = Serving(kernels, Streams.random(Sizes(), 3, 30))
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
def test_what_is_pending_is_folded_before_a_chunk(kernels):
    serving = Serving(kernels, Streams.random(Sizes(), 3, 30))
    serving.prompt(5, 1, 9)
    serving.step([4, 4, 1], [2, 4, 1])
    serving.prompt(7, 1, 0)
    serving.check()
    serving.step([1, 3, 4], [1, 2, 4])
    serving.check()


def test_a_request_may_begin_with_a_step(kernels):
    """A prompt of one token need not be told from a decoded one."""
    serving = Serving(kernels, Streams.random(Sizes(), 3, 30))
    for counts, stands in ([1, 4, 3], [1, 4, 1]), ([4, 4, 4], [1, 2, 3]), ([1, 1, 1], [1, 1, 1]):
        serving.step(counts, stands)
        serving.check()


def test_no_other_slot_or_layer_is_read_or_written(kernels):
    """Which shows when they are full of NaN, and when they are not."""
    streams = Streams.random(Sizes(), 2, 30)
    runs = [Serving(kernels, streams, slots=(3, 1), fill=fill) for fill in (np.nan, 7.0)]
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
def test_a_step_reads_and_writes_no_columns_but_its_own(kernels, sizes):
    """On a GPU programs run in any order: one may have written the new tokens' columns before
    another reads. So what a step writes it must not look at, but for u, which has one owner.

    What it should not read is NaN, in all rings at once. Steps are of all lengths, the rings come
    round several times, and the most that may be pending is.
    """
    sizes, prompt_width = SIZES[sizes]
    width = sizes.most_rows
    most_columns = max(sizes.taps - 1 + width, 2 * width)
    serving = Serving(kernels, Streams.random(sizes, 1, 5 * most_columns), sizes)
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
    "kernels", ["reference", pytest.param("interpret", marks=pytest.mark.slow)]
)
def test_errors_do_not_grow_over_hundreds_of_steps(kernels):
    """A folded correction comes from a step that may have verified others before it."""
    rng, num_steps = np.random.default_rng(0), 600
    accepted = rng.integers(1, STEP_WIDTH + 1, num_steps)
    streams = Streams.random(Sizes(), 1, accepted.sum() + 1)
    serving = Serving(kernels, streams)
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
    ],
)
def test_kernels_round_no_worse_than_the_reference(sizes, width):
    sizes, prompt_width = SIZES[sizes]
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


def test_a_wrong_count_of_pending_tokens_shows_and_only_where_it_is_wrong(kernels):
    """Of the step before, of another row, of all rows or drafts, or cut to the convolution's; also
    where a prompt came last, or was run as a step."""
    serving = Serving(kernels, Streams.random(Sizes(), 6, 40), slots=(2, 0, 3))
    serving.prompt(5, 9, 2)
    serving.step([6, 6, 6], [1, 4, 2])
    serving.step([6, 6, 6], [3, 5, 4])
    new, as_step = serving.fork(), serving.fork()
    new.begin(np.arange(3), [3, 4, 5])
    new.prompt(4, 9, 1)
    as_step.step([1, 4, 6], [1, 4, 6])
    for case in serving, new, as_step:
        for count in range(STEP_WIDTH + 1):
            fork, is_right = case.fork(), case.pending == count
            fork.step([1] * 3, [1] * 3, pending=[count] * 3)
            errors = np.array(fork.last_errors())
            assert (errors[is_right] < TOLERANCE).all()
            assert (errors[~is_right] >= (np.inf if case is new else 100 * TOLERANCE)).all()
        case.step([1, 1, 1], [1, 1, 1], width=1)
        case.check()
        case.step([4, 1, 2], [1, 1, 2])
        case.check()


@pytest.mark.parametrize("folds", [False, True])
def test_padding_rows_with_stale_slots(kernels, folds):
    """Of a request that is not in the batch, or past the last slot: nothing of theirs changes."""
    serving = Serving(kernels, Streams.random(Sizes(), 3, 40), slots=(2, 0, 3))
    serving.prompt(5, 9, 2)
    serving.step([4, 4, 4], [2, 3, 4])
    for idle_slots in None, serving.num_slots, serving.num_slots + 7, 2**31 - 1:
        fork = serving.fork()
        width = PROMPT_WIDTH if folds else STEP_WIDTH
        fork.step([2, 0, 0], [2, 0, 0], width, folds=folds, idle_slots=idle_slots)
        for x, y in zip(serving.of_requests(), fork.of_requests(), strict=True):
            np.testing.assert_array_equal(x[1:], y[1:])
            assert not np.array_equal(x[0], y[0], equal_nan=True)
        fork.step([1, 1, 1], [1, 1, 1])
        fork.check()
