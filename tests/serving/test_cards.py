"""Cards and drivers that cannot do what others can, pretended on a CPU."""

import warnings

import pytest
from support.refusals import refusal

from specjax import LLM
from specjax.serving import defaults
from specjax.serving.defaults import DEFAULTS, choose_dtype, choose_kernels


@pytest.mark.parametrize("stored", ["bfloat16", "float16"])
@pytest.mark.parametrize("capability", [(7, 0), (7, 5), (8, 0), (9, 0)])
def test_a_card_without_bfloat16(stored, capability, monkeypatch):
    monkeypatch.setattr(defaults, "device_defaults", lambda: DEFAULTS["gpu"])
    monkeypatch.setattr(defaults, "compute_capability", lambda: capability)
    chosen = choose_dtype("auto", stored)
    if capability >= (8, 0):
        assert chosen.name == choose_dtype("bfloat16", stored).name == "bfloat16"
        return
    assert chosen.name == choose_dtype("float32", stored).name == "float32"
    assert f"7.{capability[1]} has no bfloat16" in chosen.reason
    refusal(lambda: choose_dtype("bfloat16", stored), "capability 7", "'float32'")


@pytest.mark.parametrize("kernels", ["auto", "triton"])
def test_a_driver_that_refuses_a_kernel(kernels, monkeypatch):
    """A CPU refuses all of Triton's: where they are asked for, plain JAX runs, with one warning."""
    monkeypatch.setattr("pallas_kernels.dispatch.compute_capability", lambda: (9, 0))
    with pytest.warns(UserWarning, match=r"kernels=.+\(.+\); plain JAX runs") as seen:
        assert choose_kernels(kernels) == "reference"
    assert len(seen) == 1


def test_an_engine_on_such_a_driver_runs(checkpoints, monkeypatch):
    monkeypatch.setattr("pallas_kernels.dispatch.compute_capability", lambda: (9, 0))
    folder = checkpoints.target("llama").folder
    with pytest.warns(UserWarning, match="kernels="):
        llm = LLM(str(folder), max_num_seqs=1, max_model_len=32, verbose=False)
    with llm:
        (out,) = llm.generate([[5, 9, 2]], use_tqdm=False)
    assert out.outputs[0].token_ids


@pytest.mark.parametrize("kernels", ["auto", "reference", "interpret"])
def test_elsewhere_nothing_is_tried(kernels):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert choose_kernels(kernels) == kernels
