import pytest
from support.kernels_delta_rule import Implementation


@pytest.fixture(params=["reference", "interpret"])
def implementation(request) -> Implementation:
    """One implementation of the gated delta rule."""
    return Implementation(request.param)
