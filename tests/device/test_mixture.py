"""The padding of mixtures of experts. Their results are in tests/oracle/test_models.py."""

from functools import partial

import jax
import numpy as np
import pytest

from specjax.device.models.layers.moe import Experts, MoE, moe
from specjax.device.weights.experts import ExpertMatrices
from specjax.device.weights.matrix import Dense

pytestmark = pytest.mark.slow

ROWS, DIM, INNER, NUM_EXPERTS, NUM_CHOSEN = 13, 24, 10, 8, 3
FLOAT32 = np.dtype(np.float32)


def test_padding_reads_no_experts_that_real_rows_do_not():
    """With one real row, all experts that it does not use are NaN, and no row becomes NaN."""
    rng, sizes = np.random.default_rng(0), Experts(NUM_EXPERTS, NUM_CHOSEN, INNER)
    shapes = (DIM, NUM_EXPERTS), (NUM_EXPERTS, DIM, 2 * INNER), (NUM_EXPERTS, INNER, DIM)
    x, *weights = (rng.normal(size=shape).astype(FLOAT32) for shape in [(ROWS, DIM), *shapes])
    chosen = np.argsort(x @ weights[0], axis=1)[:, -NUM_CHOSEN:]
    others = np.setdiff1d(np.arange(NUM_EXPERTS), chosen[0])
    weights[1][others] = weights[2][others] = np.nan

    router, *matrices = weights
    params = MoE(Dense(router), *map(ExpertMatrices, matrices))
    run = jax.jit(partial(moe, params, experts=sizes, kernels="interpret"))
    out = run(x, is_padding=np.arange(ROWS) > 0)
    assert np.isfinite(out).all()
    assert np.isin(chosen[1:], others).any()  # where padding would have gone by itself
