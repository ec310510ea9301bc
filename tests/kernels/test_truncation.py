"""Every implementation of truncation, compared with sorts in float64."""

import functools

import jax
import numpy as np
import pytest

from pallas_kernels.truncation import truncate
from pallas_kernels.truncation.triton import TruncationTuning, truncate_triton

pytestmark = pytest.mark.slow

SHAPE = 240, 200  # what smaller problems are padded to: every shape is a compilation


def in_small_blocks(logits, *params):
    """Run the kernels with tiles and buffers that are smaller than rows of 200 logits."""
    config = TruncationTuning(64, 16, mask_columns=32, tile_room=16, few=8, many=32)
    return truncate_triton(logits, *params, config=config, interpret=True)


IMPLEMENTATIONS = {
    "reference": functools.partial(truncate, kernels="reference"),
    "interpret": functools.partial(truncate, kernels="interpret"),
    "in-small-blocks": in_small_blocks,
}


def made(name):
    """Return a compiled implementation, at temperature 1."""
    compiled = jax.jit(IMPLEMENTATIONS[name])

    def run(logits, *asked):
        size, vocab_size = logits.shape
        wider = np.subtract(SHAPE, logits.shape) if vocab_size <= SHAPE[1] else (0, 0)
        padded = np.pad(logits, ((0, wider[0]), (0, wider[1])), constant_values=-np.inf)
        given = [np.pad(x, (0, wider[0]), mode="edge") for x in (np.ones(size, "f"), *asked)]
        return np.asarray(compiled(padded, *given))[:size, :vocab_size]

    run.flushes = name != "reference"
    run.longest = 700 if name == "in-small-blocks" else 5000  # of many blocks, and two
    return run


@pytest.fixture(params=IMPLEMENTATIONS, scope="module")
def run(request):
    return made(request.param)


def kept_by_sorting(logits, top_k, top_p, min_p, slack=0.0):
    """Return which logits of a row are kept. `slack` moves the thresholds of top_p and min_p."""
    with np.errstate(divide="ignore"):
        floor = logits.max() + np.log(np.float64(min_p)) - slack
    kept = ((logits >= floor) | (logits == logits.max())) & (logits > -np.inf)
    if 0 < top_k < kept.sum():
        kept &= logits >= np.sort(logits[kept])[-top_k]
    if top_p < 1:
        ranked = -np.sort(-logits[kept])
        sums = np.cumsum(np.exp(ranked.astype(np.float64) - ranked[0]))
        enough = sums >= (top_p + slack) * sums[-1]
        kept &= logits >= ranked[np.argmax(enough) if enough.any() else -1]
    return kept


def check(run, logits, top_k, top_p, min_p, slack=0.0):
    """Compare each row with a sort. Logits within `slack` of a threshold may differ."""
    top_k, top_p = np.array(top_k, np.int32), np.array(top_p, np.float32)
    min_p = np.array(min_p, np.float32)
    out = run(logits, top_k, top_p, min_p)
    for row, cut, *params in zip(logits, out, top_k, top_p, min_p, strict=True):
        kept = cut > -np.inf
        assert (kept_by_sorting(row, *params, -slack) <= kept).all(), params
        assert (kept <= kept_by_sorting(row, *params, slack)).all(), params
        np.testing.assert_array_equal(cut[kept], row[kept])
    return out


def adversarial_rows(rng, vocab_size):
    """Return rows of equal, tied, infinite, tiny and huge logits."""
    normal = rng.normal(size=vocab_size)
    is_out = rng.random(vocab_size) < 0.5
    is_out[0] = False
    rows = [
        np.zeros(vocab_size),
        np.round(normal),
        np.round(normal * 2) / 2 - 50,
        np.where(is_out, -np.inf, normal),
        np.where(np.arange(vocab_size) == vocab_size // 2, 1.5, -np.inf),
        normal * 1e-30,
        normal * 1e30,
        normal * 1e-40,
        np.where(is_out, 1e38, -1e38),
        -np.abs(normal) * 5,
        np.where(is_out, -0.0, 0.0),
        np.linspace(0, 20, vocab_size),
    ]
    return np.array(rows, np.float32)


@pytest.mark.parametrize("vocab_size", [1, 7, 200, "longest"])
def test_random_and_adversarial_rows(run, vocab_size):
    """A slack of 1e-5 allows for the rounding of a sum of many probabilities."""
    # With many rows, the kernel takes blocks that are shorter than the longest vocabulary.
    vocab_size, repeats = (run.longest, 8) if vocab_size == "longest" else (vocab_size, 12)
    rng = np.random.default_rng(vocab_size)
    scales = np.array([0.1, 1, 1, 3, 10])[:, None]
    rows = np.concatenate(
        [adversarial_rows(rng, vocab_size), rng.normal(size=(5, vocab_size)) * scales]
    ).astype(np.float32)
    if run.flushes:  # on a CPU the maxima of denormal logits are 0, in the reference none is taken
        rows = rows[(rows == 0).all(axis=1) | (np.abs(rows).max(axis=1) > 1e-38)]
    rows = np.repeat(rows, repeats, axis=0)
    n = len(rows)
    top_k = rng.choice([0, 0, 1, 2, 5, max(vocab_size // 2, 1), vocab_size, vocab_size + 9], n)
    # Below 1e-38 the device flushes top_p to zero, and the best are left.
    top_p = rng.choice([1, 0, 1e-40, 1e-30, 1e-6, 0.2, 0.5, 0.9, 0.999, 1 - 2**-24], n)
    min_p = rng.choice([0, 0, 1e-4, 0.1, 0.7, 1.0], n)
    asks_nothing = rng.random(n) < 0.2
    top_k[asks_nothing], top_p[asks_nothing], min_p[asks_nothing] = 0, 1, 0
    check(run, rows, top_k, top_p, min_p, slack=1e-5)


@pytest.mark.every_jax
def test_each_works_on_what_the_ones_before_left(run):
    """With probabilities .4 .3 .2 .1, any other order of truncations keeps another set."""
    logits = np.log(np.float32([[0.1, 0.4, 0.2, 0.3]] * 5))
    top_k, top_p = [2, 3, 2, 0, 2], [0.55, 0.75, 0.5, 0.7, 0.58]
    min_p = [0.0, 0.0, 0.0, 0.4, 0.6]
    out = check(run, logits, top_k, top_p, min_p)
    # .4/.7 > .55; .4 + .3 = 7/9 > .75; .4/.7 > .5; .4 + .3 = 7/9 > .7; .4/.7 < .58
    assert (out > -np.inf).sum(axis=1).tolist() == [1, 2, 1, 2, 2]
    assert (out[:, 1] > -np.inf).all()


@pytest.mark.every_jax
def test_ties_fill_the_room_for_candidates(run):
    """More equal logits than fit in the buffer are at each kind of threshold."""
    rows = np.float32([[5.0] + [1.0] * 150 + [0.0] * 49] * 3)
    out = check(run, rows, [2, 0, 160], [1, 0.9, 0.99], [0, 0, 0], slack=1e-5)
    assert (out > -np.inf).sum(axis=1).tolist() == [151, 151, 200]


def test_candidates_fill_their_room(run):
    """The candidates just fit in the buffer. The largest of them are last."""
    rows = np.full((1, 200), -20, np.float32)
    rows[0, -32:] = np.linspace(0, 3, 32)
    out = check(run, rows, [32], [0.3], [0])
    assert 1 < (out > -np.inf).sum() < 8


BOTH = made("reference"), made("interpret")
CANDIDATES = {  # their number in each of six tiles
    "few": [300] * 6,
    "in more registers": [1000] * 6,
    "spread evenly": [1500] * 6,
    "in one tile": [2000, 0, 0, 200, 0, 0],
    "more than the room of a tile": [2100, 0, 0, 0, 0, 0],
    "more than any registers hold": [2048] * 9,
    "all": [8192] * 6,
}


@pytest.mark.parametrize("number", CANDIDATES.values(), ids=CANDIDATES)
def test_any_number_of_candidates_is_cut_alike(number):
    """Candidates are limited only by min_p. Thresholds of top_k and top_p are among them."""
    rng, rows = np.random.default_rng(7), np.full((4, len(number), 8192), -20, np.float32)
    for tile, count in enumerate(number):
        at = rng.permutation(8192)[:count]
        rows[:, tile, at] = rng.uniform(0, 2, (4, count))
    rows = rows.reshape(4, -1)
    rows[3] = np.maximum(rows[3], 1)  # of which many are equal
    params = [0, 40, 0, 0], [0.5, 0.7, 0.05, 0.9], [1e-3] * 4
    np.testing.assert_array_equal(*(check(run, rows, *params, slack=1e-5) for run in BOTH))


def test_rows_whose_maxima_do_not_reach_top_p():
    """Rows are normal logits, and equal logits, of which all are kept."""
    top_p = np.repeat(np.float32([0.9, 0.95, 0.999, 1 - 2**-20]), 2)
    rows = np.random.default_rng(8).normal(size=(8, 20_000)) * np.resize([0.5, 2], 8)[:, None]
    rows = np.concatenate([rows, np.full((3, 20_000), -3)]).astype(np.float32)
    for run in BOTH:
        out = check(run, rows, [0] * 9 + [7, 7], [*top_p, 0.9, 1, 0.5], [0] * 11, slack=1e-6)
        np.testing.assert_array_equal(out[8:], rows[8:])
