"""Compilation for an H200 in a process of its own, so that this one's JAX stays on the CPU."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from specjax.inspect.compile import compile_functions, has_cuda_plugin
from specjax.inspect.resources import Resources

SHARED_MEMORY = 227 * 1024  # that one program may have


@pytest.fixture(scope="session")
def compile_for_h200() -> Callable[..., dict[Any, dict[str, Any]]]:
    """Compiles functions of a file in one process; skips without the plugin.

    (file, {case: (function, its arguments)}, fields of every request) -> reports by case.
    """
    if not has_cuda_plugin():
        pytest.skip("needs jax's CUDA plugin (jax-cuda13-plugin, jax-cuda13-pjrt)")

    def compile_cases(file, cases, *, resources=False, **fields):
        requests = [
            {"function": function, "arguments": dict(arguments), **fields}
            for function, arguments in cases.values()
        ]
        made = compile_functions(file, requests, resources=resources, timeout=1200)
        return dict(zip(cases, made, strict=True))

    return compile_cases


@pytest.fixture(scope="session")
def resources_of() -> Callable[[Mapping[str, Any]], dict[str, Resources]]:
    """The kernels of a report by name."""
    return lambda report: {one.name: one for one in map(Resources.of, report["resources"])}


@pytest.fixture(scope="session")
def fitting_kernels(resources_of) -> Callable[[Mapping[str, Any]], dict[str, Resources]]:
    """The kernels of a report by name: none spills, and all have the shared memory they need."""

    def check(report):
        kernels = resources_of(report)
        assert kernels
        for kernel in kernels.values():
            assert not kernel.spills and kernel.shared_bytes <= SHARED_MEMORY, kernel
        return kernels

    return check
