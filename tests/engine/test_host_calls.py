"""The host's cost of a step, in Python calls: unlike times, calls are the same in every run."""

import sys
from pathlib import Path

import pytest
from support.engines import simulated_engine

import specjax
from specjax.config import EngineConfig
from specjax.host.request import Request
from specjax.host.speculation.acceptance import Acceptance
from specjax.host.speculation.policy import GoodputPolicy, StaticPolicy
from specjax.host.speculation.step_cost import StepCost
from specjax.sampling_params import SamplingParams

SOURCES = str(Path(specjax.__file__).parent)
NUM_STEPS, PROMPT = 24, 8
MANY_SHAPES = {
    "decode_batches": (1, 2, 4, 8, 16, 32),
    "prefill_shapes": ((1, 8), (4, 8), (32, 8), (1, 16), (4, 16), (1, 32), (8, 32)),
}
FEW_SHAPES = {"decode_batches": (32,), "prefill_shapes": ((32, 8),)}


def adaptive(max_k):
    """Return a policy that learns times and knows some already, as when serving."""
    cost = StepCost({b: {k: 1 + b * k for k in range(max_k + 1)} for b in (8, 32)}, batches=(8, 32))
    return GoodputPolicy(range(max_k + 1), cost, Acceptance(max_k))


def calls_per_step(num_requests, policy, **shapes):
    """Return the calls of this package's functions in a step in which all requests decode."""
    config = EngineConfig(
        max_model_len=256,
        max_num_seqs=32,
        max_num_batched_tokens=32 * PROMPT,
        num_pages=32 * 16,
        page_size=16,
        compile_ahead=True,
        **shapes,
    )
    engine = simulated_engine(config, policy)
    params = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
    samples = []
    for i in range(num_requests):
        samples += engine.add(Request(i, (i,) * PROMPT, params, 200, (i,)))
    while not all(sample.num_output for sample in samples):
        engine.step()
    engine.step()
    num_calls = 0

    def count(frame, event, argument):
        nonlocal num_calls
        num_calls += event == "call" and frame.f_code.co_filename.startswith(SOURCES)

    sys.setprofile(count)
    try:
        for _ in range(NUM_STEPS):
            engine.step()
    finally:
        sys.setprofile(None)
    assert not any(sample.is_finished for sample in samples)
    return num_calls / NUM_STEPS


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "k", "own", "per_request"),
    [(StaticPolicy, 0, 87, 4.6), (StaticPolicy, 3, 88, 5.3), (adaptive, 3, 243, 4.1)],
)
def test_a_request_costs_a_step_few_calls(make, k, own, per_request):
    """Some of the calls happen only when a page is full."""
    few, many = (calls_per_step(count, make(k), **FEW_SHAPES) for count in (8, 32))
    each = (many - few) / 24
    assert each < per_request
    assert few - 8 * each < own


def test_shapes_cost_a_step_nothing():
    """Results that depend only on the shapes are not computed again in each step."""
    many, few = (calls_per_step(8, StaticPolicy(3), **s) for s in (MANY_SHAPES, FEW_SHAPES))
    assert many == few
