"""The static settings of an engine's steps (`StepModel`), and the state that steps need."""

from types import SimpleNamespace

from support.engines import gpu_model

from specjax.config import EngineConfig
from specjax.device.verification import SeedExact
from specjax.engine.step_model import step_model


def test_large_batches_are_observed_later_on_a_gpu():
    """Several rounds are observed together: at least four, or as many as have up to 64 rows."""
    config = EngineConfig(max_model_len=16, num_pages=1)
    target = SimpleNamespace(cache_kinds=(), vocabulary=None)
    drafter = SimpleNamespace(may_defer=True)
    gpu = gpu_model(config, target, drafter, SeedExact(), "cpu")
    cpu = step_model(config, target, drafter, SeedExact(), "cpu")
    batches = 1, 8, 16, 32, 64, 256
    assert [gpu.max_deferred(batch) for batch in batches] == [64, 8, 4, 4, 4, 4]
    assert [cpu.max_deferred(batch) for batch in batches] == [16, 2, 0, 0, 0, 0]
