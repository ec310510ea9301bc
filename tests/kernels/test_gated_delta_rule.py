"""Every implementation of the gated delta rule against its equations, token by token in f64."""

import copy
import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.dispatch import UnsupportedError
from pallas_kernels.gated_delta_rule import (
    DeltaRuleCache,
    DeltaRuleWeights,
    Heads,
    gated_delta_rule,
    num_ring_columns,
)
from pallas_kernels.gated_delta_rule.reference import (
    Tokens,
    advance,
    invert_unit_lower,
    recur_chunks,
)
from pallas_kernels.gated_delta_rule.triton import gated_delta_rule_triton

# What takes the interpreter long; shorter tests run it every time.
INTERPRETED_SLOWLY = ["reference", pytest.param("interpret", marks=pytest.mark.slow)]
LAYER, NUM_LAYERS = 1, 3
PROMPT_WIDTH = 9
TOLERANCE = 2e-5
BF16_TOLERANCE = 5 * 2**-9  # four roundings of an output, the first of its norm as well
EPS = 1e-3  # of the norm: so large that it shows


@dataclass(frozen=True)
class Sizes:
    """Of the rule, and of a cache in which most_rows tokens may be pending."""

    heads: Heads = Heads(2, 4, 16, 32)
    taps: int = 4
    most_rows: int = 6
    dtype: str = "float32"
    is_normed: bool = True

    @property
    def columns(self):
        return num_ring_columns(self.taps, self.most_rows)


@dataclass(frozen=True)
class Streams:
    """The tokens that stand, of N requests with n tokens each, and what should come of them."""

    x: np.ndarray  # f32[N, n, C + H_v D_v + 2 H_v], of values that the sizes' dtype has
    weights: DeltaRuleWeights  # f32 arrays, likewise
    heads: Heads

    @classmethod
    def random(cls, sizes, num_streams, length, seed=0):
        """Some heads forget within a token, others within hundreds."""
        rng = np.random.default_rng(seed)
        heads = sizes.heads

        def held(z):
            return np.asarray(jnp.asarray(z, sizes.dtype).astype(jnp.float32))

        x = rng.normal(size=(num_streams, length, heads.inputs))
        weights = DeltaRuleWeights(
            held(rng.normal(size=(sizes.taps, heads.channels)) / 2),
            np.linspace(-7.0, 1.0, heads.num_values, dtype=np.float32),
            rng.normal(size=heads.num_values).astype(np.float32),
            held(rng.uniform(0.5, 2.0, heads.value_dim)) if sizes.is_normed else None,
        )
        return cls(held(x), weights, heads)

    @functools.cached_property
    def truth(self):
        return rule_by_definition(self)


def rule_by_definition(streams, *, reads_before_decay=False):
    """Outputs [N, n, H_v, D_v], and states [N, n + 1, H_v, D_v, D_k] after 0, 1, ... tokens."""
    x = streams.x.astype(np.float64)
    conv, log_decay, decay_bias, norm = (
        None if z is None else z.astype(np.float64) for z in streams.weights
    )
    num_streams, length, _ = x.shape
    num_keys, num_values, key_dim, value_dim = streams.heads
    channels, inner = streams.heads.channels, num_values * value_dim
    x, z, b, a = np.split(x, np.cumsum([channels, inner, num_values]), axis=2)
    gs, betas = -np.exp(log_decay) * np.log1p(np.exp(a + decay_bias)), 1 / (1 + np.exp(-b))
    out = np.zeros((num_streams, length, num_values, value_dim))
    states = np.zeros((num_streams, length + 1, num_values, value_dim, key_dim))
    for t in range(length):
        y = sum(conv[-1 - i] * x[:, t - i] for i in range(min(len(conv), t + 1)))
        y = y / (1 + np.exp(-y))
        for j in range(num_values):
            key_head = j // (num_values // num_keys)
            q = y[:, key_head * key_dim :][:, :key_dim]
            k = y[:, (num_keys + key_head) * key_dim :][:, :key_dim]
            v = y[:, 2 * num_keys * key_dim + j * value_dim :][:, :value_dim]
            q, k = (z / np.sqrt((z**2).sum(1, keepdims=True) + 1e-6) for z in (q, k))
            g, beta = gs[:, t, j, None, None], betas[:, t, j, None, None]
            decayed = np.exp(g) * states[:, t, j]
            read = states[:, t, j] if reads_before_decay else decayed
            u = beta * (v[..., None] - read @ k[..., None])
            states[:, t + 1, j] = decayed + u * k[:, None]
            out[:, t, j] = (states[:, t + 1, j] @ q[..., None])[..., 0] / np.sqrt(key_dim)
    if norm is not None:
        gate = (z / (1 + np.exp(-z))).reshape(out.shape)
        out = norm * out / np.sqrt((out**2).mean(-1, keepdims=True) + EPS) * gate
    return out, states


def error(actual, expected):
    """The largest difference, relative to the largest value; inf where anything is not finite."""
    actual = np.asarray(actual, np.float64)
    if not np.isfinite(actual).all():
        return np.inf
    return np.abs(actual - expected).max() / np.abs(expected).max()


@functools.partial(jax.jit, static_argnames=("folds", "kernels"), donate_argnames="cache")
def rule(x, weights, cache, layer, slots, positions, pending, *, folds, kernels):
    return gated_delta_rule(
        x, weights, cache, layer, slots, positions, pending, folds=folds, eps=EPS, kernels=kernels
    )


@dataclass(frozen=True)
class Implementation:
    """Opens caches on which one implementation runs."""

    kernels: str

    @property
    def num_rows(self):
        """Requests at a time, of random schedules; the interpreter runs one program at a time."""
        return 4 if self.kernels == "interpret" else 125

    def serve(self, streams, sizes=None, **others):
        return Serving(self.kernels, streams, sizes or Sizes(), **others)


@pytest.fixture(params=["reference", "interpret"])
def implementation(request):
    return Implementation(request.param)


class Serving:
    """Requests that one cache serves: the one in row r has slot slots[r] and tokens of one stream.

    Whatever the rule has no business with is NaN: other slots and layers, slots that are new to a
    request, rows of padding. Rows come in random order, with padding rows between them.
    """

    def __init__(
        self,
        kernels,
        streams,
        sizes,
        *,
        slots=None,
        num_slots=5,
        batch=4,
        fill=np.nan,
    ):
        self.kernels, self.streams, self.sizes = kernels, streams, sizes
        self.slots = np.arange(len(streams.x)) if slots is None else np.array(slots)
        self.num_slots, self.padding = num_slots, batch - len(self.slots)
        self.stream = np.arange(len(self.slots))
        self.pending, self.length = np.zeros_like(self.stream), np.zeros_like(self.stream)
        self.rng = np.random.default_rng(0)
        heads = sizes.heads
        places = (NUM_LAYERS, self.num_slots)
        self.cache = DeltaRuleCache(
            jnp.full((*places, heads.num_values, heads.value_dim, heads.key_dim), fill),
            jnp.full((*places, sizes.columns, heads.channels), fill, sizes.dtype),
            jnp.full((*places, sizes.columns, 2, heads.num_values), fill),
        )
        conv, log_decay, decay_bias, norm = streams.weights
        self.weights = DeltaRuleWeights(
            jnp.asarray(conv, sizes.dtype),
            jnp.asarray(log_decay),
            jnp.asarray(decay_bias),
            None if norm is None else jnp.asarray(norm, sizes.dtype),
        )
        self.out = np.full((*streams.x.shape[:2], heads.num_values, heads.value_dim), np.nan)

    def begin(self, rows, streams):
        """The requests in some rows end, and others begin in their slots."""
        self.stream[rows], self.pending[rows], self.length[rows] = streams, 0, 0

    def fork(self):
        """The same requests once more, to go another way."""
        other = copy.deepcopy(self)
        other.cache = jax.tree.map(jnp.copy, self.cache)
        return other

    def prompt(self, *counts, width=PROMPT_WIDTH, **others):
        """Run the next counts[r] tokens of every request, which are certain."""
        self.call(counts, counts, width, folds=True, **others)

    def step(self, counts, stands, width=4, **others):
        """Run counts[r] tokens of which stands[r] turn out to be right; the others are garbage."""
        self.call(counts, stands, width, folds=False, **others)

    def call(self, counts, stands, width, *, folds, pending=None, idle_slots=None):
        counts, stands, row = np.array(counts), np.array(stands), np.arange(width)
        at = self.length[:, None] + row
        is_real, is_right = row < counts[:, None], row < stands[:, None]
        taken = self.stream[:, None], np.minimum(at, self.streams.x.shape[1] - 1)
        kinds = self.rng.choice([np.nan, np.inf, -np.inf, 1e30, 3.0], is_right.shape)
        garbage = np.where(is_real, kinds, np.nan)
        x = np.where(is_right[..., None], self.streams.x[taken], garbage[..., None])
        positions = np.where(is_real, at, -1)
        slots = self.slots if idle_slots is None else np.where(counts > 0, self.slots, idle_slots)
        pending = self.pending if pending is None else np.array(pending)

        order = self.rng.permutation(len(counts) + self.padding)

        def laid_out(z, fill, dtype):
            rest = np.full((self.padding, *z.shape[1:]), fill, z.dtype)
            return np.concatenate([z, rest])[order].astype(dtype)

        out, self.cache = rule(
            jnp.asarray(laid_out(x, np.nan, np.float32), self.sizes.dtype),
            self.weights,
            self.cache,
            np.int32(LAYER),
            laid_out(slots, self.num_slots, np.int32),
            laid_out(positions, -1, np.int32),
            laid_out(pending, self.sizes.most_rows, np.int32),
            folds=folds,
            kernels=self.kernels,
        )
        assert out.dtype == self.sizes.dtype
        out = np.asarray(out.astype(jnp.float32))[np.argsort(order)][: len(counts)]
        self.out[np.broadcast_to(taken[0], at.shape)[is_right], at[is_right]] = out[is_right]
        self.pending = np.where(counts > 0, 0 if folds else stands, self.pending)
        self.length = self.length + stands

    @property
    def states(self):
        """f32[rows, H_v, D_v, D_k] of the requests, with all tokens but the pending ones."""
        return np.asarray(self.cache.state)[LAYER, self.slots]

    def check(self):
        """Outputs and states are those of the definition."""
        rounding = BF16_TOLERANCE if self.sizes.dtype == "bfloat16" else TOLERANCE
        for r, (i, n) in enumerate(zip(self.stream, self.length, strict=True)):
            out, states = (z[i] for z in self.streams.truth)
            assert not n or error(self.out[i, :n], out[:n]) < rounding
            if (num_folded := n - self.pending[r]) > 0:
                assert error(self.states[r], states[num_folded]) < TOLERANCE

    def last_errors(self):
        """Of every request's last output."""
        taken = self.stream, self.length - 1
        return list(map(error, self.out[taken], self.streams.truth[0][taken]))


SIZES = {
    "ratio1": Sizes(Heads(2, 2, 16, 32)),
    "ratio2": Sizes(),
    "ratio3": Sizes(Heads(2, 6, 32, 16)),
    "taps2": Sizes(taps=2, most_rows=3),
    "taps1": Sizes(taps=1, most_rows=2),
    "most-rows1": Sizes(most_rows=1),
    "bf16": Sizes(dtype="bfloat16"),
    "plain": Sizes(is_normed=False),
}


# The others differ from these in sizes of loops: their interpretation is among the slow tests.
INTERPRETED = "ratio3", "taps1", "bf16", "plain"


@pytest.mark.parametrize(
    "implementation, sizes",
    [
        pytest.param(
            kernels,
            sizes,
            marks=pytest.mark.slow if kernels == "interpret" and sizes not in INTERPRETED else (),
        )
        for kernels in ("reference", "interpret")
        for sizes in SIZES
    ],
    indirect=["implementation"],
)
def test_ragged_prompts_match_the_definition(implementation, sizes):
    sizes = SIZES[sizes]
    serving = implementation.serve(Streams.random(sizes, 3, 30), sizes)
    for counts in [(1, 3, 9), (2, 0, 1), (0, 0, 0), (9, 5, 0), (1, 1, 8), (5, 9, 7)]:
        serving.prompt(*counts)
        serving.check()
    assert serving.length.tolist() == [18, 18, 25]


@pytest.mark.parametrize("implementation", INTERPRETED_SLOWLY, indirect=True)
@pytest.mark.parametrize("width", [1, 5, 64, 65, 200])
def test_chunks_of_any_width_match_the_definition(implementation, width):
    serving = implementation.serve(Streams.random(Sizes(), 3, 2 * width + 1))
    for counts in [(width, max(1, width - 2), 1), (width, 1, width)]:
        serving.prompt(*counts, width=width)
        serving.check()


def test_a_prompt_leaves_nothing_but_the_history_of_the_convolution(implementation):
    serving = implementation.serve(Streams.random(Sizes(), 3, 30))
    serving.step([4, 4, 4], [2, 4, 1])
    serving.prompt(9, 2, 1)
    ring, gates = (np.asarray(x)[LAYER] for x in serving.cache[1:])
    for row, (slot, length) in enumerate(zip(serving.slots, serving.length, strict=True)):
        expected = np.full_like(ring[slot], np.nan)
        for at in range(length - 3, length):
            x = serving.streams.x[row, at, : expected.shape[1]]
            expected[at % len(expected)] = x if at >= 0 else 0
        np.testing.assert_array_equal(ring[slot], expected)
        assert np.isnan(gates[slot]).all()


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
        others = np.array(x.astype(jnp.float32))
        others[LAYER, runs[1].slots] = 7.0
        assert (others == 7.0).all()


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


@pytest.mark.parametrize("taps", [1, 4])
def test_a_step_writes_no_column_that_it_reads(implementation, taps):
    """On a GPU the programs of heads that share a key head run in any order: one may have written
    the new tokens' columns before another reads. So whatever a call writes, it must not look at.

    Filling a column with NaN shows whether it is read. Steps are of all lengths, the ring comes
    round several times, and the most that may be pending is.
    """
    sizes = Sizes(Heads(1, 2, 16, 16), taps=taps, most_rows=3)
    serving = implementation.serve(Streams.random(sizes, 1, 60), sizes, num_slots=1, batch=1)
    serving.prompt(2)
    rng, num_columns, seen = np.random.default_rng(taps), sizes.columns, set()
    while serving.length[0] < 4 * num_columns:
        count = rng.choice([3, 3, 2, 1])
        pending, start = serving.pending[0], serving.length[0]
        read = set()
        for column in range(num_columns):
            fork = serving.fork()
            fork.out[:] = 0.0
            ring = fork.cache.ring.at[LAYER, 0, column].set(np.nan)
            gates = fork.cache.gates.at[LAYER, 0, column].set(np.nan)
            fork.cache = fork.cache._replace(ring=ring, gates=gates)
            fork.step([count], [count], width=3)
            if np.isnan(fork.out).any() or np.isnan(fork.states).any():
                read.add(column)
        fork = serving.fork()
        fork.step([count], [count], width=3)
        rings = (np.asarray(x.cache.ring)[LAYER, 0] for x in (serving, fork))
        same = [np.array_equal(x, y, equal_nan=True) for x, y in zip(*rings, strict=True)]
        written = set(np.flatnonzero(~np.array(same)))
        serving.step([count], [rng.choice([1, count])], width=3)
        window = range(max(0, start - pending - (taps - 1)), start)
        assert read == {place % num_columns for place in window}
        assert written == {place % num_columns for place in range(start, start + count)}
        assert not read & written
        seen.add((pending, count))
    assert (3, 3) in seen


@pytest.mark.parametrize(
    "dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.every_jax)]
)
def test_kernels_round_no_worse_than_the_reference(dtype):
    """Of the sizes of published models."""
    sizes = Sizes(Heads(1, 2, 128, 128), dtype=dtype)
    streams = Streams.random(sizes, 1, 100)

    def errors(kernels):
        serving = Serving(kernels, streams, sizes, num_slots=1, batch=1)
        serving.prompt(60, width=64)
        for count, stands in [(4, 1), (1, 1), (4, 4), (4, 2), (2, 2), (4, 4)]:
            serving.step([count], [stands])
        length, folded = serving.length[0], serving.length[0] - serving.pending[0]
        truth = streams.truth[0][:, :length], streams.truth[1][:, folded]
        found = serving.out[:, :length], serving.states
        pairs = zip(found, truth, strict=True)
        return [np.sqrt(((x - y) ** 2).mean() / (y**2).mean()) for x, y in pairs]

    for ours, theirs in zip(errors("interpret"), errors("reference"), strict=True):
        assert ours < max(1.5 * theirs, 5e-7), (ours, theirs)


# What has gone wrong in other engines. Where a count is at fault, it must show when it is.
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


@pytest.mark.parametrize("width", [1, 4])
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
    before = [np.array(x.astype(jnp.float32))[LAYER, serving.slots] for x in serving.cache]
    for idle_slots in None, serving.num_slots, serving.num_slots + 7, 2**31 - 1:
        fork = serving.fork()
        fork.call([2, 0, 0], [2, 0, 0], 4, folds=folds, idle_slots=idle_slots)
        after = [np.array(x.astype(jnp.float32))[LAYER, serving.slots] for x in fork.cache]
        for x, y in zip(before, after, strict=True):
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
        assert all(np.isnan(x[LAYER, 0].astype(jnp.float32)).all() for x in serving.cache)


def test_count_clamped_to_the_history_of_the_convolution(implementation):
    serving = served(implementation)
    serving.step([6, 6, 6], [6, 5, 4], width=6)
    assert (errors_with(serving, np.minimum(serving.pending, 3)) > CLEARLY).all()
    for _ in range(2):
        serving.step([6, 6, 1], [6, 4, 1], width=6)
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


# The chunked form of the reference.


def random_tokens(length=300, *, fastest=1.0, noise=None, least_beta=0.0, seed=0):
    """Tokens of two heads, and a state; keys are alike but for `noise`, where that is given."""
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
    return jnp.asarray(s, jnp.float32), Tokens(*(jnp.asarray(x, jnp.float32) for x in tokens))


def recur_in_f64(s, tokens):
    s, q, k, v, g, beta = (np.asarray(x, np.float64) for x in (s, *tokens))
    out = np.zeros_like(v)
    for t in range(q.shape[1]):
        s = s * np.exp(g[:, t, :, None, None])
        u = beta[:, t, :, None] * (v[:, t] - (s @ k[:, t, :, :, None])[..., 0])
        s = s + u[..., None] * k[:, t, :, None]
        out[:, t] = (s @ q[:, t, :, :, None])[..., 0]
    return s, out


def recur_by_scan(s, tokens):
    """What steps do, in a form that can be differentiated."""
    by_time = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), tokens)
    s, out = jax.lax.scan(lambda s, token: advance(s, *token), s, by_time)
    return s, jnp.moveaxis(out, 0, 1)


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
    chunked = jax.jit(recur_chunks)(s, tokens)
    plain = jax.jit(recur_by_scan)(s, tokens)
    for ours, theirs, exact in zip(chunked, plain, expected, strict=True):
        assert error(ours, exact) < TOLERANCE
        assert error(theirs, exact) < TOLERANCE


@pytest.mark.parametrize("name", ["long", "fast", "alike"])
def test_gradients_of_chunks_equal_those_of_the_recurrence(name):
    s, tokens = TOKENS[name]
    tokens = jax.tree.map(lambda x: x[:, :70], tokens)
    weights = jnp.cos(jnp.arange(70.0))[:, None, None]

    def loss(run, s, tokens):
        s, out = run(s, tokens)
        return (s**2).sum() + (weights * out**2).sum()

    ours, expected = (
        jax.jit(jax.grad(functools.partial(loss, run), argnums=(0, 1)))(s, tokens)
        for run in (recur_chunks, recur_by_scan)
    )
    for x, y in zip(jax.tree.leaves(ours), jax.tree.leaves(expected), strict=True):
        assert error(x, np.asarray(y, np.float64)) < 10 * TOLERANCE


@pytest.mark.parametrize("size", [1, 2, 64])
def test_the_inverse_is_one(size):
    rng = np.random.default_rng(size)
    lower = np.tril(rng.uniform(0.9, 1.0, (2, 3, size, size)), -1).astype(np.float32)
    exact = np.linalg.inv(np.eye(size) + lower.astype(np.float64))
    assert error(jax.jit(invert_unit_lower)(lower), exact) < TOLERANCE


@pytest.mark.parametrize(
    "name, shapes",
    [
        ("x", {"x": (2, 168)}),
        ("x", {"x": (2, 4, 168)}),
        ("x", {"x": (2, 3, 167)}),
        ("x", {"x": (2, 3, 96)}),
        ("x", {"positions": (2, 4)}),
        ("x", {"positions": (6,)}),
        ("weights.conv", {"conv": (96, 4)}),
        ("weights.conv", {"conv": (4, 1, 96)}),
        ("weights.conv", {"conv": (9, 96)}),
        ("weights.log_decay and weights.decay_bias", {"log_decay": (2,)}),
        ("weights.log_decay and weights.decay_bias", {"decay_bias": (4, 1)}),
        ("weights.norm", {"norm": (4,)}),
        ("weights.norm", {"norm": (4, 16)}),
        ("slots and pending", {"slots": (3,)}),
        ("slots and pending", {"slots": (2, 1)}),
        ("slots and pending", {"pending": (3,)}),
        ("slots and pending", {"pending": ()}),
        ("cache.state", {"state": (5, 4, 16, 8)}),
        ("cache.state", {"ring": (5, 9, 96)}),
        ("cache.ring", {"ring": (2, 5, 9, 64)}),  # no keys
        ("cache.ring", {"ring": (2, 5, 9, 104)}),  # half a key head
        ("cache.ring", {"ring": (2, 5, 9, 112)}),  # 3 key heads of 4
        ("cache.ring and cache.gates", {"ring": (3, 5, 9, 96)}),
        ("cache.ring and cache.gates", {"ring": (2, 6, 9, 96)}),
        ("cache.ring and cache.gates", {"cache_gates": (2, 5, 8, 2, 4)}),
        ("cache.ring and cache.gates", {"cache_gates": (2, 5, 9, 4, 2)}),
        ("cache.ring and cache.gates", {"cache_gates": (2, 5, 9, 8)}),
    ],
)
def test_shapes_that_do_not_fit_are_named(name, shapes):
    fitting = {
        "x": (2, 3, 168),
        "conv": (4, 96),
        "log_decay": (4,),
        "decay_bias": (4,),
        "norm": (16,),
        "state": (2, 5, 4, 16, 8),
        "ring": (2, 5, 9, 96),
        "cache_gates": (2, 5, 9, 2, 4),
        "slots": (2,),
        "positions": (2, 3),
        "pending": (2,),
    }
    arrays: dict[str, Any] = {
        key: np.zeros(shape, np.int32 if key in ("slots", "positions", "pending") else np.float32)
        for key, shape in (fitting | shapes).items()
    }
    x, *others, slots, positions, pending = arrays.values()
    weights, cache = DeltaRuleWeights(*others[:4]), DeltaRuleCache(*others[4:])
    with pytest.raises(ValueError, match=f"^{name} (must|has)"):
        gated_delta_rule(
            *(x, weights, cache, jnp.int32(0), slots, positions, pending), folds=False, eps=EPS
        )


def test_kernels_that_do_not_exist_are_named():
    serving = Serving("cuda", Streams.random(Sizes(), 1, 9), Sizes())
    with pytest.raises(ValueError, match="kernels='cuda' is unknown; choose one of auto"):
        serving.prompt(9)
    serving.kernels = "mosaic"
    with pytest.raises(
        ValueError, match="gated_delta_rule has no such implementation; it has triton"
    ):
        serving.prompt(9)


@pytest.mark.parametrize(
    "sizes, message",
    [
        (Sizes(Heads(2, 2, 8, 16)), "D_k=8; the kernel takes 16, 32, 64, 128"),
        (Sizes(Heads(2, 2, 16, 48)), "D_v=48; the kernel takes 16, 32, 64, 128"),
        (Sizes(dtype="float16"), "x is float16; the kernel takes bfloat16, float32"),
    ],
)
def test_what_the_kernel_does_not_take_is_named(sizes, message):
    serving = Serving("reference", Streams.random(sizes, 1, 9), sizes)
    arguments = (
        *(jnp.zeros((1, 1, sizes.heads.inputs), sizes.dtype), serving.weights, serving.cache),
        *(jnp.int32(0), jnp.zeros(1, jnp.int32), jnp.zeros((1, 1), jnp.int32)),
        jnp.zeros(1, jnp.int32),
    )
    with pytest.raises(UnsupportedError, match=message):
        gated_delta_rule_triton(*arguments, folds=False, eps=EPS)
