"""Compiles for an H200 in a separate process, so that JAX in this process stays on the CPU."""

import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
from support.compiled_again import compile_again
from support.compiled_archive import ARCHIVE, COMMAND, FOLDER, unpack
from support.seeds import VARIABLE

from specjax.inspect.compile import compile_functions, has_cuda_plugin
from specjax.inspect.kept import Kept
from specjax.inspect.resources import Resources

SHARED_MEMORY = 227 * 1024  # that one program may have


@pytest.fixture(scope="session")
def seed(testrun_uid) -> int:
    """The seed that chooses which programs are compiled again. It is the same in every worker."""
    return int(os.environ.get(VARIABLE) or int(testrun_uid, 16) % 2**32)


@pytest.fixture(scope="session")
def kept(request, seed) -> Iterator[Kept]:
    """Functions compiled for an H200 by earlier runs, or from the archive.

    A program is compiled if any input of the compiler has changed. Nightly runs and `--recompile`
    compile every program. Otherwise, each worker compiles a random one again.
    """
    if not has_cuda_plugin():
        pytest.skip("needs jax's CUDA plugin (jax-cuda13-plugin, jax-cuda13-pjrt)")
    option = request.config.getoption
    is_nightly = "nightly" in option("markexpr").replace("not nightly", "")
    unpack()
    kept = Kept(FOLDER, option("recompile") or is_nightly)
    yield kept
    compile_again(kept, seed)
    if kept.num_compiled and not kept.recompiles:
        with warnings.catch_warnings():
            warnings.simplefilter("always")  # not an error
            warnings.warn(
                f"{kept.num_compiled} functions were compiled that {ARCHIVE.name} does not have; "
                f"{COMMAND} renews it",
                stacklevel=1,
            )


@pytest.fixture(scope="session")
def compile_for_h200(kept) -> Callable[..., dict[Any, dict[str, Any]]]:
    """Return a function that compiles functions of a file. Skip without the CUDA plugin.

    Its arguments are the file, {case: (function, its arguments)}, and fields of every request. It
    returns reports by case.
    """

    def compile_cases(file, cases, *, resources=False, kept=kept, **fields):
        requests = [
            {"function": function, "arguments": dict(arguments), **fields}
            for function, arguments in cases.values()
        ]
        made = compile_functions(file, requests, resources=resources, timeout=1200, kept=kept)
        return dict(zip(cases, made, strict=True))

    return compile_cases


@pytest.fixture(scope="session")
def resources_of() -> Callable[[Mapping[str, Any]], dict[str, Resources]]:
    """Return a function that returns the kernels' resources in a report, by kernel name."""
    return lambda report: {one.name: one for one in map(Resources.of, report["resources"])}


@pytest.fixture(scope="session")
def fitting_kernels(resources_of) -> Callable[[Mapping[str, Any]], dict[str, Resources]]:
    """Like `resources_of`, but also check that no kernel spills or needs too much shared memory."""

    def check(report):
        kernels = resources_of(report)
        assert kernels
        for kernel in kernels.values():
            assert not kernel.spills and kernel.shared_bytes <= SHARED_MEMORY, kernel
        return kernels

    return check
