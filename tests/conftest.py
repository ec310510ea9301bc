"""Shared fixtures: JAX on several CPU devices, fast compilation, and tiny checkpoints."""

import gc
import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from zlib import crc32

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import jax
import numpy as np
import pytest
from support.asked import Asked
from support.checkpoints import Checkpoints
from support.compilations import (
    TOOLCHAIN,
    CompilationLog,
    Process,
    compile_quickly,
    share_arenas,
    share_compilations,
)
from support.engines import gpu_model, simulated_engines
from support.seeds import VARIABLE
from support.shapes import check_boundary
from support.targets import VOCAB
from support.texts import letters_folder
from support.weights import rewrite

from specjax.engine.compiled import CompiledPrograms
from specjax.engine.engine import Engine


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--gpu-shapes", action="store_true", help="engines compile the shapes that a GPU would get"
    )
    parser.addoption(
        "--recompile", action="store_true", help="compile for an H200 what earlier runs compiled"
    )
    parser.addoption(
        "--part", metavar="I/N", help="of the modules with slow tests, run the I-th of N parts"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Set up JAX before any program is compiled. With `-m optimized`, compile as for users.

    Tracing makes many objects, few of them in cycles. With Python's usual thresholds, garbage
    collection would take a seventh of the tests' time.
    """
    gc.set_threshold(200_000, 10, 10)
    # A shell ignores SIGINT for what it starts in the background, and so would tests' processes.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # So that no code takes the one device for granted, or a dtype or rank that JAX would guess.
    jax.config.update("jax_num_cpu_devices", 4)
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    jax.config.update("jax_numpy_rank_promotion", "raise")
    check_boundary()
    share_arenas()
    share_compilations(Path(__file__).parents[1] / ".cache" / "jax")
    toolchain = TOOLCHAIN
    wanted = config.getoption("markexpr").replace("not optimized", "")
    if "optimized" not in wanted:
        compile_quickly()
        toolchain = replace(toolchain, options={})
    if config.getoption("gpu_shapes"):
        toolchain = replace(toolchain, make_model=gpu_model)
    Engine.make_programs = staticmethod(partial(CompiledPrograms, toolchain=toolchain))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With `--part I/N`, deselect the slow tests of the other parts' modules.

    A module's name decides to which part it belongs. Tests that are not slow run in every part.
    """
    if (part := config.getoption("part")) is None:
        return
    index, count = map(int, part.split("/"))

    def is_kept(item: pytest.Item) -> bool:
        is_long = any(item.get_closest_marker(mark) for mark in ("slow", "h200"))
        return not is_long or crc32(item.nodeid.partition("::")[0].encode()) % count == index

    others = [item for item in items if not is_kept(item)]
    items[:] = filter(is_kept, items)
    config.hook.pytest_deselected(items=others)


def pytest_collection_finish() -> None:
    """Exclude imported objects from garbage collection, because they stay alive in any case."""
    gc.freeze()


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print the new seeds, so that a run can be repeated."""
    reports = [r for name in ("passed", "failed") for r in terminalreporter.getreports(name)]
    drawn = [
        (r.nodeid, value) for r in reports for name, value in r.user_properties if name == VARIABLE
    ]
    for test, seed in drawn:
        terminalreporter.write_line(f"{VARIABLE}={seed} {test}")


@pytest.fixture(scope="session")
def process() -> Process:
    """The limits on this process's memory."""
    return Process()


@pytest.fixture(scope="module", autouse=True)
def small_process(process) -> Iterator[None]:
    """After a module, free compiled programs if the process is large.

    Engines that are still alive must not hold the programs.
    """
    yield
    process.keep_small()


@pytest.fixture(autouse=True)
def bounded_test(process) -> Iterator[None]:
    """A long module forgets programs, too, if it has by far more than others."""
    yield
    process.keep_in_bounds()


@pytest.fixture
def small_test(process) -> Iterator[None]:
    """Like `small_process`, but after each test: for modules whose tests have separate engines."""
    yield
    process.keep_small()


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory) -> Checkpoints:
    """Tiny checkpoints, each written at its first use. Needs torch and transformers."""
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    return Checkpoints(tmp_path_factory.mktemp("checkpoints"))


@pytest.fixture(scope="session")
def letters(checkpoints) -> Path:
    """The folder of a tiny target with a tokenizer of 96 tokens."""
    return letters_folder(checkpoints)


@pytest.fixture(scope="session")
def compilations() -> CompilationLog:
    """A log of the programs that JAX compiled since the first use of this fixture."""
    log = CompilationLog()
    jax.monitoring.register_event_duration_secs_listener(log.listen)
    return log


@pytest.fixture(scope="module")
def simulated_device() -> Iterator[Counter]:
    """Give LLMs that the module makes a simulated device; see `simulated_engines`."""
    with simulated_engines() as tally:
        yield tally


@pytest.fixture
def ragged_prompts():
    """Return a function that makes random prompts of given lengths.

    The second token of a prompt is its index.
    """

    def make(*lengths: int, vocab_size: int = VOCAB, seed: int = 0) -> list[list[int]]:
        rng = np.random.default_rng(seed)
        prompts = [rng.integers(0, vocab_size, length).tolist() for length in lengths]
        for i, prompt in enumerate(prompts):
            prompt[1:2] = [i] if len(prompt) > 1 else []
        return prompts

    return make


@pytest.fixture(scope="session")
def asked() -> type[Asked]:
    """The class `Asked`: requests that can compute the expected logits and probabilities."""
    return Asked


@pytest.fixture(scope="session")
def rewrite_tensors() -> Callable[..., None]:
    """See `support.weights.rewrite`."""
    return rewrite
