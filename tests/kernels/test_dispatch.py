"""Which implementation runs on which device, and the messages if it is not the requested one."""

import logging
import warnings

import jax
import pytest
from jax.sharding import AbstractDevice, AbstractMesh

from pallas_kernels import dispatch
from pallas_kernels.dispatch import UnsupportedError, choose, run

pytestmark = pytest.mark.every_jax

BOTH = "triton", "reference"
ALL = "mosaic", *BOTH


@pytest.fixture
def gpu(monkeypatch):
    """Return a function that simulates a GPU of a compute capability, or no GPU."""

    def set_capability(capability):
        monkeypatch.setattr(dispatch, "compute_capability", lambda: capability)

    dispatch._log_once.cache_clear()
    dispatch._warn_once.cache_clear()
    return set_capability


def even_only(x, interpret=False):
    if x % 2:
        raise UnsupportedError(f"x={x}; even numbers are supported")
    return "interpret" if interpret else "triton"


OPERATION = {"triton": even_only, "reference": lambda x: "reference"}


@pytest.mark.parametrize(
    "capability, names, chosen",
    [
        (None, BOTH, ("reference",)),
        ((9, 0), BOTH, BOTH),
        ((9, 0), ALL, ALL),
        ((9, 0), ("reference",), ("reference",)),
        ((8, 0), ALL, BOTH),
        ((7, 5), ALL, ("reference",)),
    ],
)
def test_auto_tries_all_that_the_gpu_can_run_and_says_nothing(gpu, capability, names, chosen):
    gpu(capability)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert choose("op", "auto", names) == chosen


@pytest.mark.parametrize(
    "capability, backends, reason",
    [
        (None, {"triton", "mosaic"}, "needs an NVIDIA GPU.*plain JAX"),
        ((9, 0), {"mosaic"}, f"jax {jax.__version__} has no Pallas backend for triton"),
    ],
)
def test_a_kernel_that_cannot_run_is_replaced_with_one_warning(
    gpu, monkeypatch, capability, backends, reason
):
    gpu(capability)
    monkeypatch.setattr(dispatch, "has_backend", backends.__contains__)
    with pytest.warns(UserWarning, match=f"kernels='triton': {reason}"):
        assert choose("op", "triton", BOTH) == ("reference",)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert choose("op", "triton", BOTH) == choose("op", "auto", BOTH) == ("reference",)


def test_what_the_kernel_does_not_take_goes_to_the_reference_only_under_auto(gpu, caplog):
    gpu((9, 0))
    made = [run("op", kernels, OPERATION, 2) for kernels in ("auto", *BOTH, "interpret")]
    assert made == ["triton", *BOTH, "interpret"]
    with caplog.at_level(logging.WARNING, logger="pallas_kernels"):
        assert run("op", "auto", OPERATION, 3) == run("op", "auto", OPERATION, 3) == "reference"
    assert [record.message for record in caplog.records] == [
        "op runs as plain JAX: x=3; even numbers are supported"
    ]
    for kernels in "triton", "interpret":
        with pytest.raises(ValueError, match="x=3; even numbers are supported"):
            run("op", kernels, OPERATION, 3)


def test_auto_tries_the_next_kernel_if_one_does_not_support_the_arguments(gpu):
    gpu((9, 0))
    implementations = {"mosaic": even_only, "triton": lambda x: "next", "reference": str}
    assert run("op", "auto", implementations, 3) == "next"


def test_missing_implementations_are_named():
    for kernels in "triton", "interpret":
        with pytest.raises(ValueError, match="op has no such implementation; it has reference"):
            choose("op", kernels, ("reference",))


def test_a_compilation_for_a_gpu_that_is_not_here_gets_its_kernels():
    device = AbstractDevice(device_kind="NVIDIA H200", num_cores=None, platform="gpu")
    mesh = AbstractMesh((1,), ("x",), abstract_device=device)
    with jax.sharding.use_abstract_mesh(mesh):
        assert choose("op", "auto", BOTH) == BOTH
    assert choose("op", "auto", BOTH) == ("reference",)
