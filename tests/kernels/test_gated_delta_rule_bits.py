"""Bits of the gated delta rule do not depend on how a request came to its tokens."""

import numpy as np
import pytest
from support.kernels_delta_rule import BF16_TOLERANCE, TOLERANCE, Serving, Sizes, Streams, error

from pallas_kernels.gated_delta_rule import Heads

# The interpreter takes long here.
INTERPRETED_SLOWLY = ["reference", pytest.param("interpret", marks=pytest.mark.slow)]
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
