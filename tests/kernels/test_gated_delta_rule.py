"""Every implementation of the gated delta rule against its equations, token by token in f64."""

import numpy as np
import pytest
from support.kernels_delta_rule import (
    BF16_TOLERANCE,
    LAYER,
    PROMPT_WIDTH,
    STEP_WIDTH,
    TOLERANCE,
    Serving,
    Sizes,
    Streams,
    error,
)

from pallas_kernels.gated_delta_rule import Heads

INTERPRETED_SLOWLY = ["reference", pytest.param("interpret", marks=pytest.mark.slow)]
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
    """A prompt of one token need not be told from a decoded one, and may begin with a step."""
    serving = Serving(kernels, Streams.random(Sizes(), 3, 30))
    for counts, stands in ([1, 4, 3], [1, 4, 1]), ([4, 4, 4], [1, 2, 3]), ([4, 4, 1], [2, 4, 1]):
        serving.step(counts, stands)
        serving.check()
    serving.prompt(7, 1, 0)
    serving.check()
    serving.step([1, 3, 4], [1, 2, 4])
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


@pytest.mark.parametrize("kernels", INTERPRETED_SLOWLY)
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


# --- bits do not depend on how a request came to its tokens ---------------------------------------

LENGTH = 40
NUM_ROWS = {"reference": 125, "interpret": 4}  # requests at a time
SCHEDULES = {
    "k1-long-keys": (1, Sizes(Heads(2, 2, 128, 16))),
    **{f"k{k}": (k, Sizes()) for k in (3, 5)},
    "k2-taps2-bf16": (2, Sizes(Heads(1, 2, 16, 16), taps=2, most_rows=3, dtype="bfloat16")),
}


def decode_token_by_token(kernels, streams, sizes, chunks):
    """Outputs of all streams, and states f32[N, n, H_v, D_v, D_k] of the tokens before each."""
    out = np.zeros((*streams.x.shape[:2], *streams.truth[0].shape[2:]))
    states = np.zeros_like(streams.truth[1][:, 1:])
    num_rows = NUM_ROWS[kernels]
    for first in range(0, len(streams.x), num_rows):
        some = np.arange(first, first + num_rows)
        serving = Serving(
            kernels,
            streams,
            sizes,
            slots=range(num_rows),
            num_slots=num_rows + 5,
            batch=num_rows + 3,
        )
        serving.begin(np.arange(num_rows), some)
        for counts in chunks[some].T:
            serving.prompt(*counts, width=sizes.most_rows + 1)
        while (goes_on := serving.length < LENGTH).any():
            places = some[goes_on], serving.length[goes_on]
            serving.step(goes_on * 1, goes_on * 1, width=1)
            states[places] = serving.states[goes_on]
        out[some] = serving.out[some]
    return out, states


@pytest.mark.optimized
@pytest.mark.parametrize("kernels", INTERPRETED_SLOWLY)
@pytest.mark.parametrize("name", SCHEDULES)
def test_random_schedules_have_the_bits_of_decoding_token_by_token(kernels, name):
    """Slots change hands, rows are idle, prompts and steps are of any length."""
    k, sizes = SCHEDULES[name]
    rng = np.random.default_rng(k)
    rows = NUM_ROWS[kernels]
    num_schedules = 2 * rows
    streams = Streams.random(sizes, num_schedules, LENGTH, seed=k)
    prompts = rng.integers(1, k + 3, num_schedules)
    prompts[::3] = k + 1
    chunks = np.stack([rng.integers(1, prompts + 1), prompts], axis=1)
    chunks[:, 1] -= chunks[:, 0]
    plain_out, plain_states = decode_token_by_token(kernels, streams, sizes, chunks)

    slots = rng.permutation(rows + 5)[:rows]
    serving = Serving(kernels, streams, sizes, slots=slots, num_slots=rows + 5, batch=rows + 3)
    num_mismatches, num_steps = 0, 0
    while (goes_on := serving.length < LENGTH).any():
        goes_on &= rng.random(rows) < 0.9
        mine, starts = serving.stream.copy(), serving.length.copy()
        is_prompt = starts < prompts[mine]
        idle_slots = rng.choice([serving.num_slots, 2**30])
        idle_slots = np.where(rng.random(rows) < 0.5, serving.slots, idle_slots)
        if rng.random() < 0.2:
            counts = chunks[mine, np.minimum(starts, 1)] * (is_prompt & goes_on)
            serving.prompt(*counts, width=sizes.most_rows + 1, idle_slots=idle_slots)
        else:
            counts = np.minimum(rng.integers(1, k + 2, rows), LENGTH - starts)
            counts *= ~is_prompt & goes_on
            stands = rng.integers(1, np.maximum(counts, 1) + 1) * (counts > 0)
            serving.step(counts, stands, width=k + 1, idle_slots=idle_slots)
            ran = counts > 0
            same = serving.states[ran] == plain_states[mine[ran], starts[ran]]
            num_mismatches += (~same.all(axis=(1, 2, 3))).sum()
            num_steps += ran.sum()
        done = np.flatnonzero((serving.length == LENGTH) & (serving.stream < rows))
        serving.begin(done, done + rows)
    assert num_steps > num_schedules * (LENGTH - k - 2) / (k + 1)
    assert num_mismatches == 0
    np.testing.assert_array_equal(serving.out, plain_out)
    rounding = BF16_TOLERANCE if sizes.dtype == "bfloat16" else TOLERANCE
    assert max(map(error, serving.out, streams.truth[0])) < rounding
    assert max(map(error, plain_states[:, -1], streams.truth[1][:, -2])) < TOLERANCE
