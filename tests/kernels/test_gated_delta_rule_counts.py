"""What has gone wrong in other engines: a count at fault must show when it is, and only then."""

import numpy as np
import pytest
from support.kernels_delta_rule import (
    LAYER,
    PROMPT_WIDTH,
    STEP_WIDTH,
    TOLERANCE,
    Sizes,
    Streams,
    error,
    rule_by_definition,
)

CLEARLY = 100 * TOLERANCE


def served(implementation, lengths=(5, 9, 2), slots=(2, 0, 3), seed=0):
    """Three requests after their prompts, with tokens for as many more."""
    serving = implementation.serve(Streams.random(Sizes(), 6, 40, seed), slots=slots)
    serving.prompt(*lengths)
    return serving


def errors_with(serving, pending):
    """Of the first outputs of a step that is told `pending`."""
    wrong = serving.fork()
    wrong.step([1] * 3, [1] * 3, pending=pending)
    return np.array(wrong.last_errors())


def test_stale_count_at_the_first_step_after_a_prompt(implementation):
    """A count that is not 0 meets the NaN that prompts leave behind."""
    serving = served(implementation)
    for stands in [4, 4, 4], [4, 4, 4], [2, 1, 4]:  # no column is left empty
        serving.step([4, 4, 4], stands)
    serving.begin(np.arange(3), [3, 4, 5])
    serving.prompt(4, 9, 1)
    for wrong in 1, 2, 3, 4, 6:
        assert (errors_with(serving, [wrong] * 3) == np.inf).all(), wrong
    assert (errors_with(serving, [0] * 3) < TOLERANCE).all()
    serving.step([4, 4, 4], [2, 4, 1])
    serving.check()


def test_counts_of_the_step_before_last(implementation):
    serving = served(implementation)
    serving.step([4, 4, 4], [1, 4, 2])
    stale = serving.pending
    serving.step([4, 4, 4], [3, 1, 4])
    assert (errors_with(serving, stale) > CLEARLY).all()
    assert (errors_with(serving, serving.pending) < TOLERANCE).all()


def test_counts_permuted_between_rows(implementation):
    serving = served(implementation)
    serving.step([4, 4, 4], [1, 3, 4])
    assert (errors_with(serving, serving.pending[[1, 2, 0]]) > CLEARLY).all()
    assert (errors_with(serving, serving.pending[[2, 0, 1]]) > CLEARLY).all()
    serving.step([4, 4, 4], [1, 1, 1])
    serving.check()


@pytest.mark.parametrize("width", [1, STEP_WIDTH])
def test_step_without_drafts_reads_the_wrong_state(implementation, width):
    """Of a step that verified drafts, its first token's in place of the last one's that stands."""
    serving = served(implementation)
    serving.step([4, 4, 4], [3, 2, 4])
    for wrong in 0, 1:
        assert (errors_with(serving, [wrong] * 3) > CLEARLY).all()
    for _ in range(2):
        serving.step([1] * 3, [1] * 3, width=width)
        serving.check()
    serving.step([4, 1, 2], [1, 1, 2])
    serving.check()


def test_prompt_of_k_plus_1_tokens_is_taken_for_a_step(implementation):
    """Which is right where its tokens are then pending, and must show where they are not."""
    serving = implementation.serve(Streams.random(Sizes(), 3, 40))
    as_step = serving.fork()
    as_step.step([4, 4, 4], [4, 4, 4])
    assert (errors_with(as_step, [0] * 3) > CLEARLY).all()
    serving.prompt(4, 4, 4)
    for right in serving, as_step:
        right.step([4, 4, 1], [1, 2, 1])
        right.check()


@pytest.mark.parametrize("last", [1, 4])
def test_last_chunk_of_1_or_k_plus_1_tokens_is_taken_for_a_step(implementation, last):
    serving = served(implementation, (9, 9, 5))
    as_step = serving.fork()
    as_step.step([last] * 3, [last] * 3)
    assert (errors_with(as_step, [0] * 3) > CLEARLY).all()
    serving.prompt(last, last, last)
    assert (errors_with(serving, [last] * 3) == np.inf).all()
    for right in serving, as_step:
        right.step([4, 4, 1], [3, 2, 1])
        right.step([1, 4, 4], [1, 1, 1])
        right.check()


@pytest.mark.parametrize("folds", [False, True])
def test_padding_rows_with_stale_slots(implementation, folds):
    """Of a request that is not in the batch, or past the last slot: nothing of theirs changes."""
    serving = served(implementation)
    serving.step([4, 4, 4], [2, 3, 4])
    for idle_slots in None, serving.num_slots, serving.num_slots + 7, 2**31 - 1:
        fork = serving.fork()
        width = PROMPT_WIDTH if folds else STEP_WIDTH
        fork.call([2, 0, 0], [2, 0, 0], width, folds=folds, idle_slots=idle_slots)
        for x, y in zip(serving.of_requests(), fork.of_requests(), strict=True):
            np.testing.assert_array_equal(x[1:], y[1:])
            assert not np.array_equal(x[0], y[0], equal_nan=True)
        fork.step([1, 1, 1], [1, 1, 1])
        fork.check()


@pytest.mark.parametrize("slots", [(0, 1, 2), (4, 0, 1), (1, 4, 0), (1, 2, 3)])
def test_slot_0_is_taken_for_a_null_slot(implementation, slots):
    """It is a slot like others, and not where padding rows write."""
    serving = served(implementation, slots=slots)
    for counts, stands in ([4, 1, 4], [1, 1, 3]), ([1, 4, 2], [1, 2, 2]):
        serving.step(counts, stands)
        serving.check()
    if 0 not in slots:
        assert all(np.isnan(np.asarray(x, np.float32)[LAYER, 0]).all() for x in serving.cache)


def test_count_clamped_to_the_history_of_the_convolution(implementation):
    serving = served(implementation)
    serving.step([6, 6, 6], [6, 5, 4])
    assert (errors_with(serving, np.minimum(serving.pending, 3)) > CLEARLY).all()
    for _ in range(2):
        serving.step([6, 6, 1], [6, 4, 1])
        serving.check()


def test_rewinding_by_drafts_and_not_by_rows(implementation):
    serving = served(implementation)
    serving.step([4, 4, 4], [2, 1, 4])
    assert (errors_with(serving, serving.pending - 1) > CLEARLY).all()  # drafts that stand
    assert (errors_with(serving, [3] * 3) > CLEARLY).all()  # all drafts
    assert (errors_with(serving, [4] * 3)[:2] > CLEARLY).all()  # all rows
    assert (errors_with(serving, [2, 1, 4]) < TOLERANCE).all()


def test_reading_before_the_decay(implementation):
    """Chunks and steps both decay first."""
    serving = served(implementation, (5, 9, 7))
    serving.step([4, 4, 4], [4, 4, 4])
    serving.check()
    wrong, _ = rule_by_definition(serving.streams, reads_before_decay=True)
    for i, start, end in zip(serving.stream, (5, 9, 7), serving.length, strict=True):
        assert error(serving.out[i, :start], wrong[i, :start]) > CLEARLY
        assert error(serving.out[i, start:end], wrong[i, start:end]) > CLEARLY
