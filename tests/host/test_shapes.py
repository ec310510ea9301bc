"""Which of the available shapes a step runs in."""

import itertools

import pytest

from specjax.config import EngineConfig
from specjax.host.shapes import Shapes, num_rows

PREFILL = ((1, 32), (4, 32), (16, 32), (1, 128), (4, 128), (1, 512))
DECODE = tuple(itertools.product((1, 2, 4, 8), (0, 1, 3)))
EVERY = Shapes(PREFILL, DECODE)


def test_they_are_those_of_the_config_and_every_k():
    config = EngineConfig(max_model_len=64, num_pages=8, max_num_seqs=4, max_num_batched_tokens=64)
    shapes = Shapes.all_of(config, (0, 2))
    assert shapes.prefill == config.prefill_shapes == ((1, 32), (2, 32), (1, 64))
    assert set(shapes.decode) == {(b, k) for b in (1, 2, 4) for k in (0, 2)}


@pytest.mark.parametrize("num_sequences", range(9))
@pytest.mark.parametrize("k", range(4))
@pytest.mark.parametrize("decode", [DECODE, ((8, 3),), ((8, 0), (2, 3), (8, 1)), ((4, 1), (8, 0))])
def test_a_round_has_the_fewest_rows_that_hold_it(num_sequences, k, decode):
    batch, drafts = shape = Shapes(PREFILL, decode).round(num_sequences, k)
    holding = [s for s in decode if s[0] >= num_sequences]
    whole = [s for s in holding if s[1] >= k]
    assert shape in decode and batch >= num_sequences
    if whole:
        assert drafts >= k and num_rows(shape) == min(map(num_rows, whole))
    else:
        assert drafts == max(s[1] for s in holding), "as many drafts as there are"


def test_a_batch_of_its_k_is_the_smallest_that_holds_a_round():
    for num_sequences, k in itertools.product(range(9), (0, 1, 3)):
        holding = [b for b, drafts in DECODE if b >= num_sequences and drafts == k]
        assert EVERY.batch(num_sequences, k) == min(holding)


def test_chunks_have_the_least_batch_of_their_width():
    assert EVERY.widths == [32, 128, 512]
    assert EVERY.chunks(1, 32) == (1, 32) and EVERY.chunks(2, 32) == (4, 32)
    assert EVERY.chunks(5, 128) == (4, 128), "the largest, though it does not hold them"
    assert [EVERY.max_chunks(width) for width in EVERY.widths] == [16, 4, 1]


def test_the_first_shapes_hold_any_step():
    """One shape holds all sequences with all drafts. The other has as many tokens as allowed."""
    assert EVERY.first == Shapes(((4, 128),), ((8, 3),))
    assert Shapes(((1, 64), (2, 32)), ((2, 5),)).first == Shapes(((2, 32),), ((2, 5),))
