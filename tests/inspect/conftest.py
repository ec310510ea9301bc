"""Compilation for an H200 in a process of its own, so that this one's JAX stays on the CPU."""

from collections.abc import Callable
from typing import Any

import pytest

from specjax.inspect.compile import compile_functions, has_cuda_plugin


@pytest.fixture(scope="session")
def compile_for_h200() -> Callable[..., list[dict[str, Any]]]:
    """`compile_functions`: (file, requests) -> reports; skips without the plugin."""
    if not has_cuda_plugin():
        pytest.skip("needs jax's CUDA plugin (jax-cuda13-plugin, jax-cuda13-pjrt)")
    return compile_functions
