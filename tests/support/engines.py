"""The sizes that engines have in all tests, and functions to run such engines.

Engines of the same model and sizes share compiled programs. So the first such engine compiles for
seconds, and the next one is built in a tenth of a second. An engine with another size, such as
another number of pages, compiles again. So tests use these sizes. A test that needs few pages calls
`hold_pages`, which takes the other pages away.
"""

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.scripts import Script
from support.simulated_device import SimulatedPrograms

from specjax import LLM, RequestOutput
from specjax.config import EngineConfig
from specjax.device.inputs import StepModel
from specjax.engine.compiled import CompiledPrograms
from specjax.engine.engine import Engine
from specjax.engine.step_model import step_model
from specjax.host.speculation.policy import Policy

VOCAB = 32  # small, so that untrained heads draft the right token sometimes
K = 2
SIZES: Mapping[str, Any] = {
    "max_model_len": 128,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 64,
    "page_size": 8,
    "decode_batches": (4,),
    "prefill_shapes": ((2, 32),),
    "compile_ahead": True,
    "verbose": False,
}
ANY_SHAPES: Mapping[str, Any] = {"decode_batches": None, "prefill_shapes": None}
EXACT: Mapping[str, Any] = {"exact": True, **ANY_SHAPES}
# Ways to verify drafts but the default one, as `speculative_config` has them.
VERIFICATIONS: Mapping[str, Mapping[str, Any]] = {
    "rejection": {"verification": "rejection"},
    "block": {"verification": "block"},
    "synthetic": {"verification": "synthetic", "synthetic_acceptance_length": 2.6},
}


def make_llm(
    folder: str | Path,
    method: str | None = None,
    model: str | Path | None = None,
    *,
    k: int = K,
    speculation: Mapping[str, Any] | None = None,
    **options: Any,
) -> LLM:
    """Return an LLM with the sizes `SIZES`.

    Args:
        method: the method of drafting; None for plain decoding.
        model: the drafter's folder, if the method needs one.
        speculation: further fields of the speculative config.
        options: options of the LLM, which override `SIZES`.
    """
    config = None
    if method is not None:
        config = {"method": method, "num_speculative_tokens": k, **(speculation or {})}
        if model is not None:
            config["model"] = str(model)
    return LLM(folder, speculative_config=config, **{**SIZES, **options})


def random_prompts(*lengths: int, vocab_size: int, seed: int = 0) -> list[list[int]]:
    """Return prompts of random token ids with these lengths."""
    rng = np.random.default_rng(seed)
    return [rng.integers(0, vocab_size, length).tolist() for length in lengths]


def generate(llm: LLM, prompts: Any, params: Any) -> list[RequestOutput]:
    """Call `LLM.generate` without a progress bar."""
    return llm.generate(prompts, params, use_tqdm=False)


def tokens_of(outputs: Iterable[RequestOutput]) -> list[list[int]]:
    """Return the tokens of every sample of every request, in order."""
    return [sample.token_ids for output in outputs for sample in output.outputs]


def generate_tokens(llm: LLM, prompts: Any, params: Any) -> list[list[int]]:
    """Generate, and return the tokens of every sample; see `tokens_of`."""
    return tokens_of(generate(llm, prompts, params))


def record_second_times(engine: Engine) -> list[float | None]:
    """Return a list that gets the time of each part that ran in the same program as another part.

    Only the second of two parts is recorded.
    """
    times: list[float | None] = []
    previous, time = [0.0], engine.clock.time

    def recorded(step: Any, compile_seconds: float) -> float | None:
        milliseconds = time(step, compile_seconds)
        if step.launched == previous[0]:
            times.append(milliseconds)
        previous[0] = step.launched
        return milliseconds

    engine.clock.time = recorded
    return times


def assert_idle(llm: LLM) -> None:
    """Check that the engine has no requests, and that all slots and pages are free."""
    scheduler = llm.engine.scheduler
    assert not llm.engine.has_work and scheduler.num_running == 0
    assert scheduler.pages.num_free == scheduler.pages.num_pages
    assert sorted(scheduler.residents.free_slots) == list(range(llm.engine.config.max_num_seqs))


@contextmanager
def patched(target: object, name: str, value: object) -> Iterator[None]:
    """Set an attribute to another value inside the `with` block."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(target, name, value)
        yield


@contextmanager
def held(built: LLM) -> Iterator[Callable[[int], None]]:
    """Stop the engine inside the `with` block. Yield a function that lets it run one step.

    The thread that calls the engine's `step` is not blocked: until a step is allowed, `step` does
    nothing.
    """
    step, allowed = built.engine.step, threading.Semaphore(0)

    def step_if_allowed() -> list:
        return step() if allowed.acquire(timeout=0.001) else []

    with patched(built.engine, "step", step_if_allowed):
        yield allowed.release


def gpu_model(*arguments: Any) -> StepModel:
    """Return the `StepModel` that an engine on a GPU would have, on any platform."""
    return step_model(*arguments[:-1], "gpu")


def programs_with(**changes: Any) -> Callable[..., CompiledPrograms]:
    """Return a value for `make_programs` of an engine.

    Programs are compiled as in all tests, but `changes` replace fields of the `Toolchain`.
    """
    make: Any = Engine.make_programs
    return partial(CompiledPrograms, toolchain=replace(make.keywords["toolchain"], **changes))


def hold_pages(llm: LLM, num_left: int) -> list[int]:
    """Allocate all free pages except `num_left`, and return them for `give_pages`."""
    pages = llm.engine.scheduler.pages
    taken = pages.allocate(pages.num_free - num_left)
    assert taken is not None
    return taken


def give_pages(llm: LLM, taken: list[int]) -> None:
    """Free the pages that `hold_pages` allocated."""
    llm.engine.scheduler.pages.release(taken)


def simulated_engine(config: EngineConfig, policy: Policy, vocab_size: int = VOCAB) -> Engine:
    """Return an engine without an LLM, on a simulated device. Its model has no weights."""
    kind = SimpleNamespace(is_recurrent=False, num_layers=1, window=None)
    target: Any = SimpleNamespace(vocab_size=vocab_size, cache_kinds=(kind,))
    flags = {"is_recurrent": False, "may_defer": False, "weights": None}
    drafter: Any = SimpleNamespace(draft_slots=lambda k: 0, **flags)
    nothing: Any = None
    return Engine(config, target, drafter, nothing, policy, make_programs=SimulatedPrograms)


@contextmanager
def simulated_engines(script: Script | None = None) -> Iterator[Counter]:
    """Give LLMs that are built inside the `with` block a simulated device. Yield a tally of events.

    By default, a token depends on the weights, the tokens before it and, at a temperature above 0,
    the seed. Drafts are accepted pseudo-randomly. Of the options that change logits, only
    `min_tokens` has an effect.
    """
    tally: Counter = Counter()
    make = partial(SimulatedPrograms, tally=tally, script=script)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Engine, "make_programs", staticmethod(make))
        yield tally
