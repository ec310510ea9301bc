"""Padding that hardware asks for: rows in multiples of eight change no token and no count."""

import numpy as np
import pytest

import specjax.engine
from specjax.config import EngineConfig, SpeculativeConfig
from specjax.device.cache.paged import padded_width
from specjax.device.drafters.drafter import Params
from specjax.device.drafters.registry import load_drafter
from specjax.device.models.registry import load_model
from specjax.device.step import StepModel
from specjax.engine import Engine
from specjax.host.speculation.policy import StaticPolicy
from specjax.request import Request

FLOAT32 = np.dtype(np.float32)


@pytest.fixture
def run(checkpoints, ragged_prompts, monkeypatch):
    """Outputs and acceptance of a few requests, rows padded to a multiple."""
    target = checkpoints.target("llama", vocab_size=24)
    model, params = load_model(target.folder, FLOAT32)
    folder = checkpoints.eagle3(target).folder
    config = SpeculativeConfig(method="eagle3", model=str(folder), num_speculative_tokens=2)
    drafter, head_params = load_drafter(folder, config, model, FLOAT32)

    def serve(row_multiple):
        monkeypatch.setattr(
            specjax.engine, "StepModel", lambda *static: StepModel(*static[:3], row_multiple)
        )
        engine = Engine(
            EngineConfig(max_model_len=64, max_num_seqs=2, max_num_batched_tokens=32, num_pages=12),
            model,
            drafter,
            Params(params, head_params),
            StaticPolicy(2),
        )
        for i, prompt in enumerate(ragged_prompts(5, 40, 17, vocab_size=24)):
            engine.add(Request(i, tuple(prompt), 20, float(i % 2), i, ()))
        outputs = {}
        while engine.has_work:
            outputs |= {s.request.request_id: s.output for s in engine.step()}
        return outputs, engine.metrics().num_accepted_tokens_per_pos

    return serve


def test_padded_rows_change_nothing(run):
    plain, padded = run(1), run(8)
    assert padded == plain
    assert sum(plain[1]) > 0


def test_padded_width_is_the_least_that_fits():
    for batch in 1, 2, 3, 5, 6, 8, 16:
        for width in 1, 2, 4, 6:
            padded = padded_width(batch, width, 8)
            assert padded >= width and batch * padded % 8 == 0
            assert all(batch * w % 8 for w in range(width, padded))
            assert padded_width(batch, width, 1) == width
