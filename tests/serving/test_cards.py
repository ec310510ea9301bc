"""GPUs and drivers with fewer abilities, simulated on a CPU."""

import warnings

import pytest
from support.engines import generate_tokens, make_llm
from support.refusals import refusal

from specjax import SamplingParams
from specjax.serving import defaults
from specjax.serving.defaults import DEFAULTS, choose_dtype, choose_kernels

HALVES = "bfloat16", "float16"


@pytest.mark.parametrize("stored", [*HALVES, "float32", "float8", None])
@pytest.mark.parametrize("capability", [None, (7, 0), (7, 5), (8, 0), (9, 0)])
def test_dtypes_by_device(stored, capability, monkeypatch):
    """On a CPU, on GPUs without bfloat16, and on other GPUs."""
    if capability is not None:
        monkeypatch.setattr(defaults, "device_defaults", lambda: DEFAULTS["gpu"])
        monkeypatch.setattr(defaults, "compute_capability", lambda: capability)
    has_bfloat16 = capability is None or capability >= (8, 0)
    chosen = choose_dtype("auto", stored)
    is_half = stored in HALVES and capability is not None and has_bfloat16
    assert chosen.name == ("bfloat16" if is_half else "float32")
    assert choose_dtype("float", stored).name == choose_dtype("float32", stored).name == "float32"
    if has_bfloat16:
        assert choose_dtype("bfloat16", stored).name == "bfloat16"
        return
    refusal(lambda: choose_dtype("bfloat16", stored), "capability 7", "'float32'")
    if stored in HALVES:
        assert f"7.{capability[1]} has no bfloat16" in chosen.reason


@pytest.mark.parametrize("kernels", ["auto", "triton"])
def test_a_driver_that_refuses_a_kernel(kernels, monkeypatch):
    """A CPU cannot run Triton kernels. If they are requested, plain JAX runs, with one warning."""
    monkeypatch.setattr("pallas_kernels.dispatch.compute_capability", lambda: (9, 0))
    with pytest.warns(UserWarning, match=r"kernels=.+\(.+\); plain JAX runs") as seen:
        assert choose_kernels(kernels) == "reference"
    assert len(seen) == 1


@pytest.mark.slow
def test_an_engine_on_such_a_driver_runs(checkpoints, monkeypatch):
    monkeypatch.setattr("pallas_kernels.dispatch.compute_capability", lambda: (9, 0))
    folder = checkpoints.target("llama").folder
    with pytest.warns(UserWarning, match="kernels="):
        llm = make_llm(folder)
    with llm:
        assert generate_tokens(llm, [[5, 9, 2]], SamplingParams(max_tokens=4))[0]


@pytest.mark.parametrize("kernels", ["auto", "reference", "interpret"])
def test_elsewhere_nothing_is_tried(kernels):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert choose_kernels(kernels) == kernels
