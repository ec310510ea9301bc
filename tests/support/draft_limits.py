"""Tables of a target and a drafter, rules for the number of drafts, and the engine's `settle`."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax.device import step
from specjax.device.drafters.drafter import NoDrafter, Variant
from specjax.device.inputs import DecodeInputs, StepModel
from specjax.device.state import init_state
from specjax.device.verification import Block, Rejection
from specjax.host.speculation.acceptance import Acceptance, DraftOutcome
from specjax.host.speculation.policy import DecodeLoad, GoodputPolicy, Policy, Round, TablePolicy
from specjax.host.speculation.step_cost import StepCost

V, K, NUM_TOKENS = 3, 3, 3
PROMPT = (0, 0)
LENGTH = len(PROMPT) + NUM_TOKENS * (K + 1)
UNLIMITED = 99
METHODS = [Rejection(), Block()]


@dataclass(frozen=True)
class Tables:
    """By the number of tokens so far, two or more alike, and the last two of them."""

    p: np.ndarray  # [3, V, V, V]
    q: np.ndarray  # [3, V, V, V]
    lookup: np.ndarray  # [3, V, V], certain drafts

    @property
    def joint(self) -> np.ndarray:
        """Of the first three tokens, [V, V, V]."""
        first, second, third = self.p[0][PROMPT], self.p[1][PROMPT[-1]], self.p[2]
        return first[:, None, None] * second[:, :, None] * third


def tables_of(seed):
    """The odd ones have zeros."""
    rng = np.random.default_rng(seed)
    x = rng.dirichlet([1.0] * V, size=(2, 3, V, V)) + 0.03
    if seed % 2:
        x = np.where((x < 0.2) & (x < x.max(axis=-1, keepdims=True)), 0, x)
    p, q = x / x.sum(axis=-1, keepdims=True)
    return Tables(p, q, rng.integers(V, size=p.shape[:-1]))


def after(table, tokens, ends):
    """What a table says [B, ...] after the first ends[b] tokens, prompt included."""
    rows = np.arange(len(tokens))
    depths = np.minimum(ends - len(PROMPT), 2)
    return table[depths, tokens[rows, ends - 2], tokens[rows, ends - 1]]


def rows_after(table, tokens, ends, drafts):
    """What a table says [B, K+1, ...] before the drafts i32[B, K], and after each of them."""
    batch, k = drafts.shape
    tokens = np.pad(tokens, ((0, 0), (0, k)))
    tokens[np.arange(batch)[:, None], ends[:, None] + np.arange(k)] = drafts
    return np.stack([after(table, tokens, ends + i) for i in range(k + 1)], axis=1)


# The rules.


class Seen(NamedTuple):
    """What is known of a round that is over."""

    k: int
    num_drafts: int
    num_accepted: int
    note: int  # what else the rule wanted to keep


@dataclass(frozen=True)
class Past:
    """What came before a round."""

    tokens: tuple[int, ...] = ()
    rounds: tuple[Seen, ...] = ()


def all_of_them(past, drafts, q):
    return drafts.shape[1]


def nothing(drafts):
    return 0


@dataclass(frozen=True)
class Rule:
    """How many drafts a round makes, how many of them may stand, and by what words.

    `may_stand` and `found` see the drafts i32[B, K] and what they are drawn from, f32[B, K, V].
    """

    k: Callable = lambda past: K
    may_stand: Callable = all_of_them  # what the host says
    found: Callable = all_of_them  # what the drafter says
    max_tokens: int = UNLIMITED
    note: Callable = nothing  # of a round's drafts, for later rounds


def leading(flags):
    """How many flags [B, K] are set before the first that is not."""
    return np.cumprod(flags, axis=1).sum(axis=1)


def at_drafts(q, drafts):
    return np.take_along_axis(q, drafts[..., None], axis=2)[..., 0]


def k_of(make: Callable[[], Policy], num_sequences, past):
    """What a policy says that has seen the rounds of the past, among so many sequences."""
    policy = make()
    for i, seen in enumerate(past.rounds):
        load = DecodeLoad(num_sequences(past.rounds[:i]))
        assert policy.choose(load) == seen.k
        verdict = DraftOutcome(seen.num_drafts, seen.num_accepted)
        ms = STEP_MS[seen.k] * (1 + 0.01 * seen.num_accepted)
        policy.observe(Round(load.num_sequences, seen.k, 0, {verdict: 1}, ms))
    return policy.choose(DecodeLoad(num_sequences(past.rounds)))


STEP_MS = {0: 1.0, 1: 1.45, 2: 1.8, 3: 2.1}


def goodput_policy():
    return GoodputPolicy(range(K + 1), StepCost({1: STEP_MS}), Acceptance(K))


def table_policy():
    return TablePolicy(((1, 1, 3), (2, 2, 2), (3, 3, 1), (4, 9, 0)))


def alone(rounds):
    return 1


def with_others(rounds):
    """As if another request came for each draft that fell."""
    return 1 + sum(seen.num_drafts - seen.num_accepted for seen in rounds)


def by_verdict(past):
    """Most drafts once all have stood, or else fewer than before."""
    if not past.rounds:
        return 1
    last = past.rounds[-1]
    return K if last.num_accepted == last.num_drafts else last.k - 1


def by_tokens(past, drafts, q):
    return (1 + 2 * sum(past.tokens) + len(past.tokens)) % (K + 1)


def by_note(past, drafts, q):
    return past.rounds[-1].note if past.rounds else 1


def by_largest(past, drafts, q):
    """Where the drafter is unsure, stop: whatever it then drew."""
    return leading(q.max(axis=2) >= 0.6)


def by_drafts_before(past, drafts, q):
    """Whether draft i may stand depends in some way on those before it."""
    before = np.cumsum(drafts, axis=1) - drafts + np.arange(drafts.shape[1])
    return leading((sum(past.tokens) + before) % 3 < 2)


def by_value(past, drafts, q):
    return leading(at_drafts(q, drafts) >= 0.5)


def by_deeper_value(past, drafts, q):
    """None may stand unless the last turned out to be likely."""
    k = drafts.shape[1]
    return np.where(at_drafts(q, drafts)[:, k - 1 :] >= 0.5, k, 0).sum(axis=1)


def by_budget(past, drafts, q):
    """As many as their own confidences add up to."""
    return at_drafts(q, drafts).sum(axis=1).round()


ADAPTIVE = {
    "goodput": Rule(partial(k_of, goodput_policy, alone)),
    "table": Rule(partial(k_of, table_policy, with_others)),
    "by_verdict": Rule(by_verdict),
}
RIGHT = {
    **{f"k={k}": Rule(lambda past, k=k: k) for k in range(K + 1)},
    **{f"limit={n}": Rule(may_stand=lambda past, drafts, q, n=n: n) for n in range(K)},
    **ADAPTIVE,
    "max_tokens": Rule(max_tokens=NUM_TOKENS),
    "limit_by_tokens": Rule(may_stand=by_tokens),
    "found_by_tokens": Rule(found=by_tokens),
    "limit_by_earlier_drafts": Rule(may_stand=by_note, note=lambda drafts: int(drafts[-1])),
    "limit_by_largest": Rule(may_stand=by_largest),
    "found_by_largest": Rule(found=by_largest),
    "limit_by_drafts_before": Rule(may_stand=by_drafts_before),
    "all_together": Rule(by_verdict, by_largest, by_tokens, max_tokens=NUM_TOKENS),
}
WRONG = {
    "limit_by_value": Rule(may_stand=by_value),
    "found_by_value": Rule(found=by_value),
    "limit_by_deeper_value": Rule(may_stand=by_deeper_value),
    "limit_by_budget": Rule(may_stand=by_budget),
}


# A round of the engine.


class Rows(NamedTuple):
    """Requests, and where they stand."""

    tokens: np.ndarray  # i32[B, T], prompt and output
    ends: np.ndarray  # i32[B], how many of them there are
    limits: np.ndarray  # i32[B], most that there may be
    seeds: np.ndarray  # u32[B]
    temperature: np.ndarray  # f32[B]


def logits_of(p, temperature):
    """What gives p [B, K+1, V] at a temperature, or at 0 its best tokens."""
    with np.errstate(divide="ignore"):
        logits = np.log(p) * np.where(temperature > 0, temperature, 1)[:, None, None]
    return logits.astype(np.float32)


@cache
def idle_state(batch):
    """An engine's state without requests."""
    one = jax.jit(init_state, static_argnums=range(6))(1, LENGTH, V, (), (), None)
    return jax.tree.map(lambda x: np.repeat(np.asarray(x), batch, axis=0), one)


def settle(method, state, rows, may_stand, draft, logits):
    """`step.settle` of an engine in which nothing else goes on."""
    batch = len(rows.tokens)
    sampling = replace(state.requests.sampling, seeds=rows.seeds, temperature=rows.temperature)
    state = replace(
        state,
        tokens=rows.tokens,
        requests=replace(state.requests, limits=rows.limits, sampling=sampling),
    )
    goes_on = rows.ends < rows.limits
    state = state.with_progress(
        jnp.arange(batch), rows.ends - 1, jnp.zeros(batch, jnp.int32), goes_on, is_observed=True
    )
    nothing = jnp.zeros(batch, jnp.int32)
    inputs = DecodeInputs(jnp.arange(batch), may_stand, nothing, nothing[:, None][:, :0])
    model = StepModel(None, NoDrafter(), method, "auto", 1, 1, "raw")
    extension = step.Extension(None, logits)
    return step.settle(None, state, inputs, draft, extension, model=model, variant=Variant())
