"""A mixture of experts against the module of transformers, with its weights; and its padding."""

from functools import partial

import jax
import numpy as np
import pytest
from support.weights import randomise

from specjax.checkpoint.spec import TensorSpec
from specjax.device.models.layers.moe import Experts, MoE, moe, moe_specs
from specjax.device.models.layers.router import SoftmaxRouter
from specjax.device.weights.experts import ExpertMatrices
from specjax.device.weights.matrix import Dense

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

ROWS, DIM, INNER, NUM_EXPERTS, NUM_CHOSEN = 13, 24, 10, 8, 3
FLOAT32 = np.dtype(np.float32)


def test_a_mixture_whose_weights_do_not_add_up():
    """Other rules are parts of the models in tests/oracle/test_models.py."""
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

    config = transformers.Qwen3MoeConfig(
        hidden_size=DIM,
        moe_intermediate_size=INNER,
        num_experts=NUM_EXPERTS,
        num_experts_per_tok=NUM_CHOSEN,
        norm_topk_prob=False,
    )
    sizes = Experts(NUM_EXPERTS, NUM_CHOSEN, INNER, router=SoftmaxRouter(False))
    module = Qwen3MoeSparseMoeBlock(config).eval()
    tensors = dict(module.state_dict())
    randomise(tensors, seed=3)
    specs = moe_specs(sizes, DIM, "mlp", ["mlp.experts.gate_up_proj"])
    params = jax.tree.map(
        lambda spec: spec.join(
            [tensors[name.removeprefix("mlp.")].numpy() for name in spec.names], FLOAT32
        ),
        specs,
        is_leaf=lambda x: isinstance(x, TensorSpec),
    )
    x = torch.randn(ROWS, DIM, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = module(x[None])
    expected = (expected[0] if isinstance(expected, tuple) else expected)[0]
    mixed = jax.jit(partial(moe, experts=sizes, kernels="reference"))(params, x.numpy())
    np.testing.assert_allclose(mixed, expected.numpy(), rtol=0, atol=1e-5)


def test_padding_reads_no_experts_that_real_rows_do_not():
    """Batch size 1: where all experts but those of the one real row are NaN, no row is NaN."""
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
