"""One set of sizes for the engines of all tests, on the device or on a simulated one.

A second engine of the same model and sizes is built in a tenth of a second, since JAX keeps what
it compiled for the first; one that differs in a size, pages included, compiles for seconds. So
tests build engines as they like, of these sizes; those that want few pages take the others away.
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

VOCAB = 32  # small, so that drafts of untrained heads are right now and then
K = 3
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
    """An LLM of these sizes.

    Args:
        method: of drafting; None decodes plainly. Its other settings are in `speculation`.
        model: the drafter's folder, for the methods that have one.
        options: of the LLM, over `SIZES`.
    """
    config = None
    if method is not None:
        config = {"method": method, "num_speculative_tokens": k, **(speculation or {})}
        if model is not None:
            config["model"] = str(model)
    return LLM(folder, speculative_config=config, **{**SIZES, **options})


def random_prompts(*lengths: int, vocab_size: int, seed: int = 0) -> list[list[int]]:
    """Token ids at random."""
    rng = np.random.default_rng(seed)
    return [rng.integers(0, vocab_size, length).tolist() for length in lengths]


def generate(llm: LLM, prompts: Any, params: Any) -> list[RequestOutput]:
    """`LLM.generate` without a bar."""
    return llm.generate(prompts, params, use_tqdm=False)


def tokens_of(outputs: Iterable[RequestOutput]) -> list[list[int]]:
    """The tokens of every sample, one request after another."""
    return [sample.token_ids for output in outputs for sample in output.outputs]


def generate_tokens(llm: LLM, prompts: Any, params: Any) -> list[list[int]]:
    """What `tokens_of` makes of what is generated."""
    return tokens_of(generate(llm, prompts, params))


def assert_idle(llm: LLM) -> None:
    """Nothing is left of any request: all slots and pages are free."""
    scheduler = llm.engine.scheduler
    assert not llm.engine.has_work and scheduler.num_running == 0
    assert scheduler.pages.num_free == scheduler.pages.num_pages
    assert sorted(scheduler.residents.free_slots) == list(range(llm.engine.config.max_num_seqs))


@contextmanager
def patched(target: object, name: str, value: object) -> Iterator[None]:
    """An attribute has another value inside the block."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(target, name, value)
        yield


@contextmanager
def held(built: LLM) -> Iterator[Callable[[int], None]]:
    """Within, the engine makes no step but those let go; the thread that asks for them goes on."""
    step, allowed = built.engine.step, threading.Semaphore(0)

    def step_if_allowed() -> list:
        return step() if allowed.acquire(timeout=0.001) else []

    with patched(built.engine, "step", step_if_allowed):
        yield allowed.release


def gpu_model(*arguments: Any) -> StepModel:
    """`step_model` as on a GPU, with its number of rows, whatever the platform is."""
    return step_model(*arguments[:-1], "gpu")


def programs_with(**changes: Any) -> Callable[..., CompiledPrograms]:
    """For `make_programs` of an engine: as tests compile, but for some fields of `Toolchain`."""
    make: Any = Engine.make_programs
    return partial(CompiledPrograms, toolchain=replace(make.keywords["toolchain"], **changes))


def hold_pages(llm: LLM, num_left: int) -> list[int]:
    """Take all but `num_left` free pages away, until `give_pages`."""
    pages = llm.engine.scheduler.pages
    taken = pages.allocate(pages.num_free - num_left)
    assert taken is not None
    return taken


def give_pages(llm: LLM, taken: list[int]) -> None:
    """Give back what `hold_pages` took."""
    llm.engine.scheduler.pages.release(taken)


def simulated_engine(config: EngineConfig, policy: Policy, vocab_size: int = VOCAB) -> Engine:
    """The loop alone, on a simulated device; requests are made by hand."""
    kind = SimpleNamespace(is_recurrent=False, num_layers=1, window=None)
    target: Any = SimpleNamespace(vocab_size=vocab_size, cache_kinds=(kind,))
    flags = {"is_recurrent": False, "may_defer": False, "weights": None}
    drafter: Any = SimpleNamespace(draft_slots=lambda k: 0, **flags)
    nothing: Any = None
    return Engine(config, target, drafter, nothing, policy, make_programs=SimulatedPrograms)


@contextmanager
def simulated_engines(script: Script | None = None) -> Iterator[Counter]:
    """LLMs made inside the block run on a simulated device; what their devices do is counted.

    Without a script tokens hang on weights, history and, above temperature 0, on the seed; drafts
    are accepted as if by chance. Of what requests ask of logits, `min_tokens` alone is obeyed.
    """
    tally: Counter = Counter()
    make = partial(SimulatedPrograms, tally=tally, script=script)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Engine, "make_programs", staticmethod(make))
        yield tally
