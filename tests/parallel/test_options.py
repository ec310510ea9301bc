"""Tensor parallel engines with other uses of their models and weights."""

from dataclasses import dataclass, replace

import jax
import numpy as np
import pytest
from support.engines import SIZES, K, generate_tokens, make_llm
from support.refusals import refusal
from support.shared_models import eagle3, hybrid, llama

from specjax import SamplingParams
from specjax.checkpoint.division import even
from specjax.device.models.llama import Llama
from specjax.device.models.registry import load_model, save_model
from specjax.rl import OnlineDistiller, RolloutEngine
from specjax.rl.nnx import PolicyModule
from specjax.serving.source import open_model

pytestmark = pytest.mark.slow

FLOAT32 = np.dtype(np.float32)
GREEDY = SamplingParams(temperature=0, max_tokens=8)


def test_the_own_tree_and_a_saved_folder(checkpoints):
    """The engine's own divided and padded arrays are a valid update. Saved experts are whole."""
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
    """A `Model` value may come from another engine. Its parameters are the whole model's."""
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


@dataclass(frozen=True, kw_only=True)
class Misdivided(Llama):
    """A Llama whose feed-forward layers are wider on each device than their weights."""

    @property
    def shares(self):
        return {**super().shares, "mlp": even(self.intermediate_size + 2, self.num_devices)}


def test_what_cannot_be_divided(checkpoints):
    """The errors come before weights are read: the NaN in these weights is not found."""
    folder = llama(checkpoints).folder
    model, params = load_model(folder, FLOAT32)
    spoilt = jax.tree.map(lambda x: x * np.nan, params)
    recurrent, _ = load_model(hybrid(checkpoints), FLOAT32)
    heads = recurrent.delta_heads._replace(num_values=3)
    for do, *expected in (
        (lambda: replace(model, num_heads=5), "num_heads=5", "num_kv_heads=2", "4 or 6 would"),
        (lambda: replace(recurrent, delta_heads=heads), "num_values=3", "2 or 4 would"),
        (
            lambda: open_model(Misdivided(**vars(model)), spoilt, num_devices=2),
            *("tensor_parallel_size=2", "gate_proj.weight", "[25, 32]", "[48, 32] into [24, 32]"),
        ),
        (
            lambda: open_model(object(), spoilt, num_devices=2),
            *("tensor_parallel_size=2", "num_devices and divides_experts", "object is none"),
        ),
        (lambda: open_model(model, {"norm": spoilt.norm}, num_devices=2), "params do not fit"),
    ):
        refusal(do, *expected)
    lines = []
    open_model(folder, num_devices=3, log=lines.append)
    assert lines == [
        "zeros fill up what 3 devices do not divide evenly: "
        "vocab 96 as 3 x 64, heads 4 as 3 x 2, kv_heads 2 as 3 x 1"
    ]
