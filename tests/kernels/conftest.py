from collections.abc import Iterator
from functools import partial

import pytest
from support import kernels_delta_rule, triton_stand_in
from support.race_checker import RaceChecker

from pallas_kernels import dispatch, triton_call


@pytest.fixture(params=["reference", "interpret"])
def kernels(request) -> str:
    """The name of each implementation that can run here."""
    return request.param


@pytest.fixture
def checker(monkeypatch) -> Iterator[RaceChecker]:
    """Run kernels as jax_triton would, on a checker that finds races."""
    checker = RaceChecker()
    for module in triton_call, dispatch:
        monkeypatch.setattr(module, "backend", lambda: "jax_triton")
    monkeypatch.setattr(triton_call, "launch", partial(triton_stand_in.launch, checker))
    monkeypatch.setattr(dispatch, "compute_capability", lambda: (9, 0))
    kernels_delta_rule.rule.clear_cache()
    yield checker
    kernels_delta_rule.rule.clear_cache()
