"""Bits of the gated delta rule do not depend on how a request came to its tokens."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.kernels_delta_rule import BF16_TOLERANCE, TOLERANCE, Sizes, Streams, error

from pallas_kernels.gated_delta_rule import Heads
from pallas_kernels.gated_delta_rule.reference import advance

# The interpreter takes long here.
INTERPRETED_SLOWLY = ["reference", pytest.param("interpret", marks=pytest.mark.slow)]
LENGTH = 40
SCHEDULES = {
    **{f"k{k}": (k, Sizes()) for k in (1, 3, 5)},
    "k2-taps2-bf16": (2, Sizes(Heads(1, 2, 16, 16), taps=2, most_rows=3, dtype="bfloat16")),
}


def decode_token_by_token(implementation, streams, sizes, chunks):
    """Outputs of all streams, and states f32[N, n, H_v, D_v, D_k] of the tokens before each."""
    out = np.zeros((*streams.x.shape[:2], *streams.truth[0].shape[2:]))
    states = np.zeros_like(streams.truth[1][:, 1:])
    num_rows = implementation.num_rows
    for first in range(0, len(streams.x), num_rows):
        some = np.arange(first, first + num_rows)
        serving = implementation.serve(
            streams, sizes, slots=range(num_rows), num_slots=num_rows + 5, batch=num_rows + 3
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
@pytest.mark.parametrize("implementation", INTERPRETED_SLOWLY, indirect=True)
@pytest.mark.parametrize("name", SCHEDULES)
def test_random_schedules_have_the_bits_of_decoding_token_by_token(implementation, name):
    """Slots change hands, rows are idle, prompts and steps are of any length."""
    k, sizes = SCHEDULES[name]
    rng = np.random.default_rng(k)
    rows = implementation.num_rows
    num_schedules = 2 * rows
    streams = Streams.random(sizes, num_schedules, LENGTH, seed=k)
    prompts = rng.integers(1, k + 3, num_schedules)
    prompts[::3] = k + 1
    chunks = np.stack([rng.integers(1, prompts + 1), prompts], axis=1)
    chunks[:, 1] -= chunks[:, 0]
    plain_out, plain_states = decode_token_by_token(implementation, streams, sizes, chunks)

    slots = rng.permutation(rows + 5)[:rows]
    serving = implementation.serve(streams, sizes, slots=slots, num_slots=rows + 5, batch=rows + 3)
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


@pytest.mark.optimized
@pytest.mark.parametrize("implementation", INTERPRETED_SLOWLY, indirect=True)
def test_a_forced_rejection_leaves_the_bits_of_plain_decoding(implementation):
    """Over many turns of the ring; and so does accepting everything, or another k every step."""
    length = 200 if implementation.kernels == "interpret" else 400
    sizes = Sizes(Heads(2, 2, 128, 16))
    streams = Streams.random(sizes, 1, length + 13)

    def decode(*steps):
        serving = implementation.serve(streams, sizes)
        serving.prompt(7)
        while serving.length[0] < 7 + length:
            for num_rows, stands in steps:
                serving.step([num_rows], [stands], width=num_rows)
        assert serving.length[0] == 7 + length
        serving.step([1], [1], width=1)
        return serving

    plain = decode((1, 1))
    plain.check()
    for steps in (
        [(4, 1)],
        [(4, 4)],
        [(1, 1), (4, 1), (2, 1), (3, 1)],
        [(1, 1), (4, 4), (2, 1), (3, 2)],
    ):
        other = decode(*steps)
        np.testing.assert_array_equal(other.out, plain.out)
        np.testing.assert_array_equal(other.states, plain.states)


@pytest.mark.optimized
def test_a_folded_token_leaves_the_bits_of_the_step_that_verified_it():
    """Of the reference: what `advance` makes with a token's u, and what it made of it."""
    rng, batch, length, num_heads = np.random.default_rng(0), 3, 40, 2

    def random(*shape):
        return rng.normal(size=(batch, length, num_heads, *shape)).astype(np.float32)

    q, k, v = random(16), random(16) / 4, random(32)
    decay, beta = rng.uniform(size=(2, batch, length, num_heads)).astype(np.float32)
    state = np.zeros((batch, num_heads, 32, 16), np.float32)

    @jax.jit
    def run(q, k, v, decay, beta, known):
        def step(t, carry):
            s, us = carry
            token = (x[:, t] for x in (q, k, v, decay, beta, known))
            s, _, u = advance(s, *token)
            return s, us.at[:, t].set(u)

        return jax.lax.fori_loop(0, length, step, (jnp.asarray(state), jnp.zeros_like(v)))

    verified, u = run(q, k, v, decay, beta, jnp.zeros_like(v))
    folded, _ = run(0 * q, k, 0 * v, decay, 0 * beta, u)
    np.testing.assert_array_equal(folded, verified)
    assert np.abs(verified).max() > 0.1
