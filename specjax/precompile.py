"""Executables, one per step shape, compiled before the first request."""

import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from specjax.batch import packed_shape, run_decode, run_prefill
from specjax.device.drafters.drafter import Params
from specjax.device.state import EngineState
from specjax.device.step import StepModel
from specjax.host.scheduler import DecodePlan, PrefillPlan, StepPlan


def keep_compilations(folder: Path) -> None:
    """Keep compiled programs in `folder` for later processes, unless JAX already has a cache."""
    if jax.config.values["jax_compilation_cache_dir"] is None:
        jax.config.update("jax_compilation_cache_dir", str(folder))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)


class Executables:
    """Compiled steps by shape. A shape that was not compiled ahead is compiled, and counted."""

    def __init__(self, params: Params, state: EngineState, model: StepModel, pages_per_seq: int):
        self._shapes = jax.tree.map(_shape, (params, state))
        self._model = model
        self._pages_per_seq = pages_per_seq
        self._compiled: dict[tuple[str, int, int], Any] = {}
        self._num_ahead = 0
        self.compile_seconds = 0.0

    @property
    def num_compilations(self) -> int:
        """Executables in hand."""
        return len(self._compiled)

    @property
    def num_late(self) -> int:
        """Executables that a request had to wait for."""
        return self.num_compilations - self._num_ahead

    def compile_ahead(self, plans: Iterable[StepPlan], *, show_progress: bool) -> None:
        """Compile the shapes of `plans` that are not in hand, in parallel."""
        missing = {key: plan for plan in plans if (key := _key(plan)) not in self._compiled}
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
            futures = {pool.submit(self._compile, plan): key for key, plan in missing.items()}
            for future in as_completed(futures):
                self._compiled[futures[future]] = future.result()
                progress.advance(task)
        self._num_ahead += len(missing)
        self.compile_seconds += time.perf_counter() - start

    def run(
        self, plan: StepPlan, params: Params, state: EngineState, packed: jax.Array
    ) -> tuple[EngineState, jax.Array]:
        """Launch the executable of `plan`'s shape. `state` is donated."""
        key = _key(plan)
        if key not in self._compiled:
            start = time.perf_counter()
            self._compiled[key] = self._compile(plan)
            self.compile_seconds += time.perf_counter() - start
        return self._compiled[key](params, state, packed)

    def _compile(self, plan: StepPlan) -> Any:
        params, state = self._shapes
        packed = jax.ShapeDtypeStruct(packed_shape(plan, self._pages_per_seq), jnp.int32)
        if isinstance(plan, DecodePlan):
            lowered = run_decode.lower(params, state, packed, model=self._model, k=plan.k)
        else:
            lowered = run_prefill.lower(params, state, packed, model=self._model, width=plan.width)
        return lowered.compile()


def _key(plan: StepPlan) -> tuple[str, int, int]:
    if isinstance(plan, PrefillPlan):
        return "prefill", plan.batch, plan.width
    return "decode", plan.batch, plan.k


def _shape(x: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
