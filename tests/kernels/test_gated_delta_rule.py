"""Every implementation of the gated delta rule, compared with its equations in f64."""

import functools

import jax
import jax.numpy as jnp
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
from support.marks import marked

from pallas_kernels.gated_delta_rule import Heads
from pallas_kernels.gated_delta_rule.reference import Tokens, advance, recur_chunks

INTERPRETED_SLOWLY = ["reference", pytest.param("interpret", marks=pytest.mark.slow)]
PUBLISHED = Heads(1, 2, 128, 128)  # sizes of a head in published models

# What a kernel is compiled for, few programs with all of it, and the width of their prompts.
SIZES = {
    "default": (Sizes(), PROMPT_WIDTH),
    "ratio3-taps1-plain": (Sizes(Heads(2, 6, 32, 16), taps=1, most_rows=2, is_normed=False), 9),
    "published-bf16": (Sizes(PUBLISHED, dtype="bfloat16"), 30),  # two of the kernels' chunks
}


@pytest.mark.slow
@pytest.mark.parametrize("sizes", SIZES)
def test_ragged_prompts_match_the_definition(kernels, sizes):
    sizes, width = SIZES[sizes]
    serving = Serving(kernels, Streams.random(sizes, 3, 30), sizes)
    for counts in [(1, 3, 9), (2, 0, 1), (0, 0, 0), (9, 5, 0), (1, 1, 8), (5, 9, 7)]:
        serving.prompt(*counts, width=width)
        serving.check()
    assert serving.length.tolist() == [18, 18, 25]


# A whole chunk of the reference is three of the kernels'; a token more; many.
@pytest.mark.parametrize(
    "width",
    [
        PROMPT_WIDTH,
        pytest.param(65, marks=pytest.mark.slow),
        *(pytest.param(n, marks=pytest.mark.nightly) for n in (1, 200)),
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
    """A prompt of one token may run like a decoded token, so a prompt may begin with a step."""
    serving = Serving(kernels, Streams.random(Sizes(), 3, 30))
    for counts, stands in ([1, 4, 3], [1, 4, 1]), ([4, 4, 4], [1, 2, 3]), ([4, 4, 1], [2, 4, 1]):
        serving.step(counts, stands)
        serving.check()
    serving.prompt(7, 1, 0)
    serving.check()
    serving.step([1, 3, 4], [1, 2, 4])
    serving.check()


def test_no_other_slot_or_layer_is_read_or_written(kernels):
    """The others are filled with NaN in one run, and with numbers in a second run."""
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


@pytest.mark.slow
@pytest.mark.parametrize(
    "sizes, width, most",
    [
        pytest.param("published-bf16", 4, 0.0045, marks=pytest.mark.every_jax),
        ("default", STEP_WIDTH, 5e-7),
    ],
)
def test_kernels_round_little_more_than_the_reference(sizes, width, most):
    """The reference has errors of .0031 (bf16) and 2e-7 (f32) in outputs, and 2e-7 in states."""
    sizes, prompt_width = SIZES[sizes]
    streams = Streams.random(sizes, 1, 100)
    serving = Serving("interpret", streams, sizes)
    serving.step([4], [4], width=width)
    for _ in range(2):
        serving.prompt(30, width=prompt_width)
    for count, stands in [(4, 1), (1, 1), (4, 4), (4, 2), (2, 2), (4, 4)]:
        serving.step([count], [stands], width=width)
    length, folded = serving.length[0], serving.length[0] - serving.pending[0]
    pairs = (
        (serving.out[:, :length], streams.truth[0][:, :length], most),
        (serving.states, streams.truth[1][:, folded], 5e-7),
    )
    for found, truth, bound in pairs:
        assert ((found - truth) ** 2).mean() < bound**2 * (truth**2).mean()


@pytest.mark.slow
def test_a_wrong_count_of_pending_tokens_shows_and_only_where_it_is_wrong(kernels):
    """Wrong counts: of the step before, of another row, of all rows or drafts, and others.

    A prompt may come last, or run as a step.
    """
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
            last = fork.stream, fork.length - 1
            truth = serving.streams.truth[0][last]
            errors = np.array(list(map(error, fork.out[last], truth)))
            assert (errors[is_right] < TOLERANCE).all()
            assert (errors[~is_right] >= (np.inf if case is new else 100 * TOLERANCE)).all()
        case.step([1, 1, 1], [1, 1, 1], width=1)
        case.check()
        case.step([4, 1, 2], [1, 1, 2])
        case.check()


# --- bits do not depend on how a request came to its tokens ---------------------------------------

LENGTH = 40
NUM_ROWS = {"reference": 125, "interpret": 4}  # requests at a time
ROOM = {kernels: {"num_slots": n + 5, "batch": n + 3} for kernels, n in NUM_ROWS.items()}
SCHEDULES = {
    "k1-long-keys": (1, Sizes(Heads(2, 2, 128, 16))),
    **{f"k{k}": (k, Sizes()) for k in (3, 5)},
    "k2-taps2-bf16": (2, Sizes(Heads(1, 2, 16, 16), taps=2, most_rows=3, dtype="bfloat16")),
}


def decode_token_by_token(kernels, streams, sizes, chunks):
    """Return the outputs of all streams, and the states before each token.

    The states have the shape f32[N, n, H_v, D_v, D_k].
    """
    out = np.zeros((*streams.x.shape[:2], *streams.truth[0].shape[2:]))
    states = np.zeros_like(streams.truth[1][:, 1:])
    num_rows = NUM_ROWS[kernels]
    for first in range(0, len(streams.x), num_rows):
        some = np.arange(first, first + num_rows)
        serving = Serving(kernels, streams, sizes, slots=range(num_rows), **ROOM[kernels])
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
@pytest.mark.parametrize("name", marked(SCHEDULES, fast=["k3", "k5"]))
def test_random_schedules_have_the_bits_of_decoding_token_by_token(kernels, name):
    """Slots are reused, rows are sometimes idle, and prompts and steps have any length."""
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
    serving = Serving(kernels, streams, sizes, slots=slots, **ROOM[kernels])
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


# --- chunks of the reference ----------------------------------------------------------------------


def random_tokens(length=300, *, fastest=1.0, noise=None, least_beta=0.0, seed=0):
    """Return tokens of two heads, and a state. With `noise`, keys are nearly equal."""
    rng = np.random.default_rng(seed)

    def unit(z):
        return z / np.linalg.norm(z, axis=-1, keepdims=True)

    q, k, v = rng.normal(size=(3, 1, length, 2, 8))
    k = unit(k) if noise is None else unit(unit(k[:, :1]) + noise * k)
    tokens = (
        *(unit(q) / np.sqrt(8), k, v),
        -fastest * rng.uniform(size=(1, length, 2)) * [1.0, 1e-3],
        rng.uniform(least_beta, 1.0, size=(1, length, 2)),
    )
    s = rng.normal(size=(1, 2, 8, 8))
    return s.astype(np.float32), Tokens(*(x.astype(np.float32) for x in tokens))


def recur_in_f64(s, tokens):
    s, q, k, v, g, beta = (np.asarray(x, np.float64) for x in (s, *tokens))
    out = np.zeros_like(v)
    for t in range(q.shape[1]):
        s = s * np.exp(g[:, t, :, None, None])
        u = beta[:, t, :, None] * (v[:, t] - (s @ k[:, t, :, :, None])[..., 0])
        s = s + u[..., None] * k[:, t, :, None]
        out[:, t] = (s @ q[:, t, :, :, None])[..., 0]
    return s, out


@jax.jit
def recur_by_scan(s, tokens):
    """Compute the steps by a scan, which can be differentiated."""
    by_time = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), tokens)

    def step(s, token):
        q, k, v, g, beta = token
        s, o, _ = advance(s, q, k, v, jnp.exp(g), beta)
        return s, o

    s, out = jax.lax.scan(step, s, by_time)
    return s, jnp.moveaxis(out, 0, 1)


in_chunks = jax.jit(recur_chunks)

TOKENS = {
    "long": random_tokens(),
    "fast": random_tokens(fastest=20.0),  # e^-640 over a chunk, e^-3000 over all of them
    "alike": random_tokens(noise=1e-3, least_beta=0.98, fastest=1e-2),
    "equal": random_tokens(noise=0.0, least_beta=1.0, fastest=0.0),
}


@pytest.mark.parametrize("name", TOKENS)
def test_chunks_equal_the_recurrence(name):
    s, tokens = TOKENS[name]
    expected = recur_in_f64(s, tokens)
    chunked, plain = in_chunks(s, tokens), recur_by_scan(s, tokens)
    for ours, theirs, exact in zip(chunked, plain, expected, strict=True):
        assert error(ours, exact) < TOLERANCE
        assert error(theirs, exact) < TOLERANCE


@functools.partial(jax.jit, static_argnums=0)
@functools.partial(jax.grad, argnums=(1, 2))
def gradients(run, s, tokens):
    s, out = run(s, tokens)
    weights = jnp.cos(jnp.arange(out.shape[1]))[:, None, None]
    return (s**2).sum() + (weights[None] * out**2).sum()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["long", "fast", "alike"])
def test_gradients_of_chunks_equal_those_of_the_recurrence(name):
    s, tokens = TOKENS[name]
    tokens = Tokens(*(x[:, :70] for x in tokens))
    ours, expected = (gradients(run, s, tokens) for run in (in_chunks, recur_by_scan))
    for x, y in zip(jax.tree.leaves(ours), jax.tree.leaves(expected), strict=True):
        assert error(x, np.asarray(y, np.float64)) < 10 * TOLERANCE
