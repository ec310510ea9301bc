"""Tokens of speculative rounds are counted, and compared with the target's distribution.

A toy target and a toy drafter have logits that depend on the last token. Requests with different
seeds and parameters run rounds with the real code for draws, edits and verification. Their tokens
are compared with probabilities that loops and sorts compute from the target's logits in float64.

A test detects with probability .99, for each kind of request, that one of eight equally likely
tokens has gained probability from another. The gain is .058 with 1,000 requests of a kind and a
fixed seed, .025 with 10,000, and .009 with 80,000 and new seeds in every run. SPECJAX_TEST_SEED
repeats a run whose seed was printed.
"""

from dataclasses import replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec
from support.asked import Asked
from support.fits import FIXED_SEED, LEAST, NEW_SEED, pvalue
from support.seeds import new_seed

from specjax.device.drafters.drafter import DraftContext, Variant
from specjax.device.edits import History
from specjax.device.noise import Stream
from specjax.device.sampling import choose, draw_draft, process
from specjax.device.verification import Block, Draft, Rejection, SeedExact, Target
from specjax.device.vocabulary import WHOLE, SplitVocabulary
from specjax.sampling_params import SamplingParams

K, NUM_TOKENS, NUM_CONTEXTS = 2, 3, 5
SMALL = 8  # a vocabulary whose chains can all be listed
SPLIT = SplitVocabulary(200, 4, "tokens")  # 64 columns on each device; the last has 8 tokens
ROWS = {8: 1000, 64: 800, SPLIT.total: 800, 4096: 400}  # of a step, by vocabulary
LENGTH = 3 + 2 * (K + 1) + K  # a round may start with one token to go
PROMPT, OUTPUT = [1, 4], [2]


def params_of(vocab_size):
    """Return the parameters of a run's requests. Each is used by an equal part of them."""
    common = {"max_tokens": None, "temperature": 0.8}
    return [
        SamplingParams(max_tokens=None),
        SamplingParams(
            **common,
            repetition_penalty=1.3,
            presence_penalty=0.4,
            frequency_penalty=0.3,
            logit_bias={3: 1.0, 5: -0.5},
            min_tokens=3,
        ),
        SamplingParams(**common, top_k=max(5, vocab_size // 10), top_p=0.9, frequency_penalty=0.5),
        SamplingParams(**common, min_p=0.1, presence_penalty=-0.3, top_p=0.97),
    ]


@cache
def requests_of(vocab_size):
    words = [[[2, 0]], [[4, 2, 1], [6]], [], [[3, 3]]]
    return [
        Asked(params, PROMPT, OUTPUT, bad_words, stop_ids=[0])
        for params, bad_words in zip(params_of(vocab_size), words, strict=True)
    ]


def on_devices(function):
    """Compile a function of logits; for `SPLIT.total` tokens, compile it for four devices.

    Each device then has its columns of all arrays and results whose last axis has a column per
    token.
    """

    @partial(jax.jit, static_argnames=("method", "shares_noise", "is_greedy"))
    def run(*arrays, **static):
        whole = jax.eval_shape(partial(function, WHOLE, **static), *arrays)
        if not any(map(is_split, jax.tree.leaves(arrays))):
            return function(WHOLE, *arrays, **static)
        padding = SPLIT.num_devices * SPLIT.size - SPLIT.total
        split = jax.shard_map(
            lambda arrays: function(SPLIT, *arrays, **static),
            mesh=Mesh(np.array(jax.devices()[: SPLIT.num_devices]), SPLIT.axis),
            in_specs=(jax.tree.map(placed, arrays),),
            out_specs=jax.tree.map(placed, whole),
            check_vma=False,
        )(jax.tree.map(lambda x: pad_columns(x, padding) if is_split(x) else x, arrays))
        return jax.tree.map(lambda x, like: x[..., : like.shape[-1]], split, whole)

    return run


def is_split(x):
    return x.ndim > 0 and x.shape[-1] == SPLIT.total


def placed(x):
    return PartitionSpec(*[None] * (x.ndim - 1), SPLIT.axis) if is_split(x) else PartitionSpec()


def pad_columns(x, count):
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, count)])


@on_devices
def propose(vocabulary, table, tokens, lengths, requests, *, shares_noise, is_greedy):
    """Draw K drafts from the drafter's logits, as `ChainDrafter` does."""
    vocab_size, rows = table.shape[1], jnp.arange(len(lengths))
    context = DraftContext(
        slots=rows,
        starts=lengths - 1,
        is_active=jnp.ones(len(lengths), bool),
        page_table=jnp.zeros((len(lengths), 0), jnp.int32),
        requests=requests,
        history=History(tokens, lengths),
        has_edits=jnp.array(True),
        kernels="auto",
        row_multiple=1,
        shares_noise=shares_noise,
        variant=Variant(),
        vocabulary=vocabulary,
    )
    last, drafts, probs = tokens[rows, lengths - 1], [], []
    for _ in range(K):
        logits = vocabulary.without_padding(table[last % NUM_CONTEXTS])
        last, q = context.draw(logits, None, vocab_size, drafts, is_greedy=is_greedy)
        drafts.append(last)
        probs += [] if q is None else [q]
    return Draft(jnp.stack(drafts, axis=1), jnp.stack(probs, axis=1) if probs else None)


@on_devices
def processed(vocabulary, table, tokens, lengths, requests, drafts):
    last = jnp.take_along_axis(tokens, lengths[:, None] - 1, axis=1)
    rows = jnp.concatenate([last, drafts], axis=1)
    logits = vocabulary.without_padding(table[rows % NUM_CONTEXTS])
    history = History(tokens, lengths).then(drafts)
    return process(logits, requests, history, vocabulary=vocabulary)


@on_devices
def verify(vocabulary, draft, target, *, method):
    logits = vocabulary.without_padding(target.logits)
    return method.verify(draft, replace(target, logits=logits, vocabulary=vocabulary))


def tables_of(vocab_size):
    """Return the target's logits after each context, and the drafter's.

    With a large vocabulary, the target's logits are peaked.
    """
    rng = np.random.default_rng(vocab_size)
    logits = rng.normal(size=(NUM_CONTEXTS, vocab_size)) * 1.2
    logits -= 1.2 * np.log1p(
        rng.permuted(np.tile(np.arange(vocab_size), (NUM_CONTEXTS, 1)), axis=1)
    )
    guess = logits + 1.2 * rng.normal(size=logits.shape)
    return logits.astype(np.float32), guess.astype(np.float32)


class Requests:
    """`count` requests of each kind, with different seeds, and their tokens so far."""

    def __init__(self, vocab_size, count, first_seed):
        kinds = requests_of(vocab_size)
        device = Asked.on_device(kinds, vocab_size)
        self.count, num_rows = count, len(kinds) * count
        self.device = jax.tree.map(lambda x: np.repeat(np.asarray(x), count, axis=0), device)
        self.device.sampling.seeds[:] = (first_seed + np.arange(num_rows)).astype(np.uint32)
        self.tokens = np.zeros((num_rows, LENGTH), np.int32)
        self.tokens[:, :3] = [*PROMPT, *OUTPUT]
        self.lengths = np.full(num_rows, 3, np.int32)
        self.stood = np.full(num_rows, K, np.int32)  # drafts of the last round

    def drawn(self):
        """The first tokens of each kind's requests: [R, count, NUM_TOKENS]."""
        return self.tokens[:, 3 : 3 + NUM_TOKENS].reshape(-1, self.count, NUM_TOKENS)


def everything(rows, stood, drafts):
    return np.full(len(rows), K)


def by_last_verdict(rows, stood, drafts):
    """Half of the requests may draft fewer tokens if their last round accepted few."""
    return np.where(rows % 2, np.minimum(1 + 2 * stood, K), K)


def run(method, requests, tables, *, is_greedy, may_stand=by_last_verdict, num_tokens=NUM_TOKENS):
    """Run rounds until all requests have `num_tokens` tokens.

    Return the number of accepted drafts of each round. Every step has the same number of rows, so
    that all runs use the same programs.
    """
    stood, size = [], ROWS[tables[0].shape[1]]
    while len(waiting := np.flatnonzero(requests.lengths < 3 + num_tokens)):
        for rows in np.split(waiting, range(size, len(waiting), size)):
            padded = np.resize(rows, size)
            stood += step(method, requests, padded, tables, is_greedy, may_stand)[: len(rows)]
    return stood


def step(method, requests, rows, tables, is_greedy, may_stand):
    """Run a round of some requests; return each one's number of accepted drafts.

    A request may have several rows.
    """
    target, guess = tables
    tokens, lengths = requests.tokens[rows], requests.lengths[rows]
    device = jax.tree.map(lambda x: x[rows], requests.device)
    shares_noise = method.shares_noise and not is_greedy  # which is one compilation less
    draft = propose(guess, tokens, lengths, device, shares_noise=shares_noise, is_greedy=is_greedy)
    assert (draft.probs is None) == (method.shares_noise or is_greedy)
    logits = processed(target, tokens, lengths, device, draft.tokens)
    most = may_stand(rows, requests.stood[rows], np.asarray(draft.tokens)).astype(np.int32)
    target = Target(logits, device.sampling, lengths, most)
    verdict = verify(draft, target, method=method)
    accepted = np.asarray(verdict.num_accepted)
    for t, emitted in enumerate(np.asarray(verdict.tokens).T):
        stands = t <= accepted
        requests.tokens[rows[stands], lengths[stands] + t] = emitted[stands]
    requests.lengths[rows], requests.stood[rows] = lengths + accepted + 1, accepted
    return accepted.tolist()


def chains(one, table, depth, least, prefix=(), prob=1.0):
    """Yield each chain of `depth` tokens with a probability above `least`, and the probability."""
    if len(prefix) == depth:
        yield prefix, prob
        return
    now = one.then(*prefix)
    following = now.probs(table[now.output[-1] % NUM_CONTEXTS])
    for token in np.flatnonzero(prob * following > least).tolist():
        yield from chains(one, table, depth, least, (*prefix, token), prob * following[token])


@cache
def joint_of(kind):
    """Return the distribution [V, V, V] of a request's three tokens, for a small vocabulary."""
    joint, (target, _) = np.zeros((SMALL,) * NUM_TOKENS), tables_of(SMALL)
    for chain, prob in chains(requests_of(SMALL)[kind], target, NUM_TOKENS, least=0):
        joint[chain] = prob
    return joint


def check_all(drawn, kind, least):
    """Test the counts of one, two and three tokens, and of the last two, for a small vocabulary."""
    joint, counts = joint_of(kind), np.zeros((SMALL,) * NUM_TOKENS)
    np.add.at(counts, tuple(drawn.T), 1)
    for others in (1, 2), 2, (), 0:
        assert pvalue(counts.sum(axis=others), joint.sum(axis=others)) > least, (kind, others)


def check_likely(drawn, kind, vocab_size, least):
    """Test the counts of one and of two tokens. Rare chains are counted together."""
    one, (target, _) = requests_of(vocab_size)[kind], tables_of(vocab_size)
    for depth in 1, 2:
        likely = dict(chains(one, target, depth, least=LEAST / len(drawn)))
        counts = [(drawn[:, :depth] == chain).all(axis=1).sum() for chain in likely]
        counts, probs = [*counts, len(drawn) - sum(counts)], [*likely.values()]
        probs.append(max(1 - sum(probs), 0))
        assert pvalue(counts, probs) > least, (kind, depth)


def check_distribution(vocab_size, count, method, is_greedy, *, first_seed=0, least=FIXED_SEED):
    requests = Requests(vocab_size, count, first_seed)
    stood = run(method, requests, tables_of(vocab_size), is_greedy=is_greedy)
    # So that tokens of all kinds of outcomes are among those counted.
    assert 0.2 < np.mean(stood) < 1.8
    for kind, drawn in enumerate(requests.drawn()):
        if vocab_size == SMALL:
            check_all(drawn, kind, least)
        else:
            check_likely(drawn, kind, vocab_size, least)


METHODS = [SeedExact(), Rejection(), Block()]
EVERY = [(m, is_greedy) for m in METHODS for is_greedy in (False, True)]
DRAWN = [Rejection(), Block()]


@pytest.mark.parametrize(
    "vocab_size, count, method, is_greedy",
    [*((SMALL, 1_000, *case) for case in EVERY), *((64, 800, method, False) for method in DRAWN)],
)
def test_rounds_emit_the_targets_distribution(vocab_size, count, method, is_greedy):
    check_distribution(vocab_size, count, method, is_greedy)


@pytest.mark.parametrize(
    "vocab_size, count, method, is_greedy",
    [
        *(pytest.param(SMALL, 10_000, m, False, marks=pytest.mark.slow) for m in METHODS),
        pytest.param(SPLIT.total, 800, Rejection(), False, marks=pytest.mark.slow),
        pytest.param(SPLIT.total, 800, SeedExact(), False, marks=pytest.mark.nightly),
        pytest.param(SPLIT.total, 800, Block(), False, marks=pytest.mark.nightly),
        *(pytest.param(SMALL, 80_000, *case, marks=pytest.mark.nightly) for case in EVERY),
        *(pytest.param(64, 50_000, *case, marks=pytest.mark.nightly) for case in EVERY),
        *(pytest.param(4096, 3_000, m, False, marks=pytest.mark.nightly) for m in METHODS),
    ],
)
def test_more_rounds_of_new_seeds(record_property, vocab_size, count, method, is_greedy):
    seed = new_seed(record_property)
    check_distribution(vocab_size, count, method, is_greedy, first_seed=seed, least=NEW_SEED)


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_drafts_of_the_target_itself_all_stand(method):
    """The drafter's logits are the target's, and drafts are edited like tokens."""
    target, _ = tables_of(SMALL)
    requests = Requests(SMALL, 1_000, first_seed=0)
    options = {"may_stand": everything, "num_tokens": 2 * (K + 1)}
    stood = run(method, requests, (target, target), is_greedy=False, **options)
    # Rounding may turn down one in a million.
    assert set(stood) == {K} if method.shares_noise else np.mean(stood) > K - 1e-4


@pytest.mark.parametrize("is_greedy", [False, True])
def test_with_shared_noise_any_rule_may_say_which_drafts_stand(is_greedy):
    """Even a rule that depends on the tokens of drafts changes no token."""
    plain, served = Requests(SMALL, 250, first_seed=0), Requests(SMALL, 250, first_seed=0)
    for requests, rule in (
        (plain, lambda rows, stood, drafts: 0 * rows),
        (served, lambda rows, stood, drafts: drafts[:, 0] % (K + 1)),
    ):
        run(SeedExact(), requests, tables_of(SMALL), is_greedy=is_greedy, may_stand=rule)
    np.testing.assert_array_equal(plain.drawn(), served.drawn())


NUM_PAIRS, NUM_DRAWS = 40, 150


process_rows = jax.jit(process)


@partial(jax.jit, compiler_options={"xla_backend_optimization_level": 1})  # it runs for long
def draw_both(target, guess, sampling, positions):
    """Return the target's tokens, and drafts that are drawn with the target's noise."""
    stream, counters = Stream.TARGET, (positions,)
    drafts, _ = draw_draft(guess, None, 400, sampling, stream, counters, wants_probs=False)
    return choose(target, sampling, positions), drafts


@pytest.mark.slow
@pytest.mark.parametrize(
    "temperature, noise, top_p",
    [(0.3, 1, 1), (0.6, 0.5, 1), (0.6, 1, 1), (1.0, 0.5, 1), (1.0, 1, 1), (1.0, 1, 0.95)],
)
def test_coupled_drafts_stand_nearly_as_often_as_any_can(asked, temperature, noise, top_p):
    """The acceptance rate is within 3 points of its upper bound, 1 - total variation.

    The distributions are peaked, over 400 tokens. The drafter's logits have additional normal
    noise.
    """
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(NUM_PAIRS, 400)) - 2.5 * np.log1p(np.arange(400))
    logits = np.stack([logits, logits + noise * rng.normal(size=logits.shape)]).astype(np.float32)
    one = asked(SamplingParams(temperature=temperature, top_p=top_p))
    p, q = (np.array([one.probs(row) for row in rows]) for rows in logits)
    best = np.minimum(p, q).sum(axis=1)
    coupled = np.zeros(NUM_PAIRS)
    for i, (a, b) in enumerate(zip(p, q, strict=True)):
        both = (a > 0) & (b > 0)
        coupled[i] = (1 / np.maximum(a / a[both, None], b / b[both, None]).sum(axis=1)).sum()
    assert best.mean() - 0.03 < coupled.mean() < best.mean()

    device = type(one).on_device([one] * NUM_PAIRS, 400)
    history = History(np.zeros((NUM_PAIRS, 1), np.int32), np.ones(NUM_PAIRS, np.int32))
    rows = [np.asarray(process_rows(x[:, None], device, history))[:, 0] for x in logits]
    rows = [np.repeat(x, NUM_DRAWS, axis=0) for x in rows]
    n = NUM_PAIRS * NUM_DRAWS
    sampling = jax.tree.map(lambda x: np.resize(np.asarray(x), n), device.sampling)
    tokens, drafts = draw_both(*rows, sampling, np.arange(n, dtype=np.int32))
    stood = (np.asarray(tokens) == np.asarray(drafts)).reshape(NUM_PAIRS, NUM_DRAWS).mean(axis=1)
    deviation = np.sqrt((coupled * (1 - coupled)).sum() / NUM_DRAWS) / NUM_PAIRS
    assert abs(stood.mean() - coupled.mean()) < 4 * deviation
    if temperature == 1:
        certain = p[np.arange(NUM_PAIRS), q.argmax(axis=1)]
        assert stood.mean() > certain.mean() + 0.05
