"""Executables, one per step shape, compiled before the first request."""

import time
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from pallas_kernels.dispatch import compute_capability
from specjax.batch import (
    Layout,
    Part,
    run_admit,
    run_begin,
    run_decode,
    run_extend,
    run_prefill,
    run_propose,
    run_restore,
    run_settle,
    run_take,
)
from specjax.device.drafters.drafter import Params, Variant
from specjax.device.state import EngineState
from specjax.device.step import StepModel
from specjax.host.scheduler import PrefillPlan

# XLA's own matmuls are not split over their depth, which by the shape alone it would do to most of
# a step's: a kernel more for each, to sum the parts. cuBLAS, which XLA tries as well, still may.
GPU_OPTIONS = {"xla_gpu_experimental_force_split_k": 1}


def keep_compilations(folder: Path) -> None:
    """Keep compiled programs in `folder` for later processes, unless JAX already has a cache."""
    if jax.config.values["jax_compilation_cache_dir"] is None:
        jax.config.update("jax_compilation_cache_dir", str(folder))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)


class Executables:
    """Compiled steps by shape and variant. One not compiled ahead is compiled late, and counted.

    Every variant that was asked for is compiled for every shape, so that requests wait for none;
    a step runs the first variant asked for that does all it needs.
    """

    def __init__(self, params: Params, state: EngineState, model: StepModel, layout: Layout):
        self._params, self._state = jax.tree.map(_shape, (params, state))
        self._model = model
        self._layout = layout
        self._compiled: dict[Any, Any] = {}
        self._num_ahead = 0
        self.variants: list[Variant] = []
        self.compile_seconds = 0.0

    @property
    def num_compilations(self) -> int:
        """Executables in hand."""
        return len(self._compiled)

    @property
    def num_late(self) -> int:
        """Executables that a request had to wait for."""
        return self.num_compilations - self._num_ahead

    def variant_for(self, needed: Variant) -> Variant:
        """The first of the variants that does what is needed."""
        return next((v for v in self.variants if covers(v, needed)), needed)

    def compile_ahead(
        self, plans: Iterable[Part], variants: Collection[Variant], *, show_progress: bool
    ) -> None:
        """Compile `plans` in every variant, in parallel, as far as they are not in hand."""
        programs: dict[Any, Callable[[], Any]] = {}
        for variant in variants:
            for plan in plans:
                programs |= self._programs(plan, variant)
        missing = {key: lower for key, lower in programs.items() if key not in self._compiled}
        start = time.perf_counter()
        columns = (
            TextColumn("compiling steps"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
        )
        with (
            Progress(*columns, disable=not show_progress, transient=True) as progress,
            ThreadPoolExecutor(max_workers=4) as pool,
        ):
            task = progress.add_task("", total=len(missing))
            futures = {pool.submit(_compile, lower): key for key, lower in missing.items()}
            for future in as_completed(futures):
                self._compiled[futures[future]] = future.result()
                progress.advance(task)
        self.variants += [variant for variant in variants if variant not in self.variants]
        self._num_ahead += len(missing)
        self.compile_seconds += time.perf_counter() - start

    def get(self, program: str, plan: Part, variant: Variant) -> Any:
        """The executable of one of a plan's programs; `state` is donated to it."""
        programs = self._programs(plan, variant)
        key = next(key for key in programs if key[0] == program)
        if key not in self._compiled:
            start = time.perf_counter()
            self._compiled[key] = _compile(programs[key])
            self.compile_seconds += time.perf_counter() - start
        return self._compiled[key]

    def _programs(self, plan: Part, variant: Variant) -> dict[Any, Callable[[], Any]]:
        """How to lower each program of a plan, by what makes it different from others."""
        layout, model, batch = self._layout, self._model, plan.batch
        params, state = self._params, self._state
        packed = jax.ShapeDtypeStruct(layout.packed_shape(plan), jnp.int32)
        masks = None
        if variant.masks:
            masks = jax.ShapeDtypeStruct(layout.mask_shape(plan), jnp.int32)
        if isinstance(plan, PrefillPlan):

            def prefill():
                return run_prefill.lower(params, state, packed, model=model, width=plan.width)

            admissions = jax.ShapeDtypeStruct(layout.admit_shape(batch), jnp.int32)
            programs = {
                ("admit", batch): lambda: run_admit.lower(state, admissions, layout=layout),
                ("prefill", batch, plan.width): prefill,
                ("begin", batch, plan.width, variant): lambda: run_begin.lower(
                    params,
                    state,
                    packed,
                    prefill().out_info[1],
                    masks,
                    model=model,
                    variant=variant,
                ),
            }
            if state.snapshots is not None:
                moved = jax.ShapeDtypeStruct((batch, 3), jnp.int32)
                programs |= {
                    ("restore", batch): lambda: run_restore.lower(state, moved),
                    ("take", batch): lambda: run_take.lower(state, moved),
                }
            return programs
        variant, k = variant._replace(num_prompt_logprobs=None), plan.k
        if masks is None:
            return {
                ("decode", batch, k, variant): lambda: run_decode.lower(
                    params, state, packed, model=model, variant=variant, k=k
                )
            }

        drafting = variant._replace(masks=False, num_logprobs=None)

        def propose():
            return run_propose.lower(params, state, packed, model=model, variant=drafting, k=k)

        def extend():
            return run_extend.lower(params, state, packed, propose().out_info[1], model=model)

        def settle():
            return run_settle.lower(
                params,
                state,
                packed,
                propose().out_info[1],
                extend().out_info[1],
                masks,
                model=model,
                variant=variant,
            )

        return {
            ("propose", batch, k, drafting): propose,
            ("extend", batch, k): extend,
            ("settle", batch, k, variant): settle,
        }


def _compile(lower: Callable[[], Any]) -> Any:
    options = GPU_OPTIONS if compute_capability() else {}
    return lower().compile(compiler_options=options)


def covers(variant: Variant, needed: Variant) -> bool:
    """Whether a step in `variant` does all that is `needed`. Masks cost a wait, so are exact."""
    return (
        variant.edits >= needed.edits
        and set(variant.processors) >= set(needed.processors)
        and variant.masks == needed.masks
        and _at_least(variant.num_logprobs, needed.num_logprobs)
        and _at_least(variant.num_prompt_logprobs, needed.num_prompt_logprobs)
    )


def _at_least(given: int | None, needed: int | None) -> bool:
    return needed is None or (given is not None and given >= needed)


def _shape(x: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
