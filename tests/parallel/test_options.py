"""Tensor parallel engines and what else takes their models and weights."""

import jax
import numpy as np
import pytest
from support.engines import SIZES, K, generate_tokens, make_llm
from support.refusals import refusal
from support.shared_models import eagle3, llama

from specjax import SamplingParams
from specjax.device.models.registry import load_model, save_model
from specjax.rl import OnlineDistiller, RolloutEngine
from specjax.rl.nnx import PolicyModule

pytestmark = pytest.mark.slow

FLOAT32 = np.dtype(np.float32)
GREEDY = SamplingParams(temperature=0, max_tokens=8)


def test_the_own_tree_and_a_saved_folder(checkpoints):
    """The arrays of all devices are an update, also with padding; whole experts are saved."""
    folder = checkpoints.target("gpt_oss").folder
    options = {"tensor_parallel_size": 4, "enable_expert_parallel": True, **SIZES}
    with RolloutEngine(folder, **options) as engine:
        before, own = engine.checksum(), engine.params.target
        engine.update_weights(jax.tree.map(lambda x: x + 0, own))
        assert engine.checksum() == before
        save_model(folder / "saved", engine.target, own, folder)
    loaded, expected = (load_model(one, FLOAT32)[1] for one in (folder / "saved", folder))
    jax.tree.map(np.testing.assert_array_equal, loaded, expected)


def test_what_needs_a_whole_model(checkpoints):
    folder = llama(checkpoints).folder
    head = str(eagle3(checkpoints).folder)
    config = {"method": "eagle3", "model": head, "num_speculative_tokens": K}
    options = {"speculative_config": config, "tensor_parallel_size": 2, **SIZES}
    with RolloutEngine(folder, **options) as engine:
        refusal(lambda: OnlineDistiller(engine), "tensor_parallel_size=2", "on one device")
        refusal(
            lambda: PolicyModule(engine.target, engine.params.target),
            "2 devices",
            "tensor_parallel_size=1",
        )


def test_a_model_value(checkpoints):
    """It may be that of another engine; parameters are those of the whole model."""
    model, params = load_model(llama(checkpoints).folder, FLOAT32)
    found = []
    with make_llm(model, params=params, tensor_parallel_size=2) as llm:
        found.append(generate_tokens(llm, [[1, 2, 3]], GREEDY))
        divided = llm.engine.target, llm.engine.params.target
    with make_llm(divided[0], params=params) as llm:
        found.append(generate_tokens(llm, [[1, 2, 3]], GREEDY))
    assert found[0] == found[1]
    for other in divided[1], {"norm": params.norm}:
        do = lambda other=other: make_llm(model, params=other, tensor_parallel_size=2)  # noqa: E731
        refusal(do, "params do not fit", "embedding (expected [96, 32]", "whole model")
