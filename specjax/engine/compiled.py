"""Implements `Programs`, the interface between an engine and a device, with JAX.

Programs are compiled for each shape of a step, and for each variant (a set of supported request
options). Usually, a program is compiled in a thread before a step needs it.
"""

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, MutableMapping, Set
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from specjax.config import EngineConfig
from specjax.device.drafters.drafter import Drafter, Params, Variant
from specjax.device.inputs import StepModel
from specjax.device.layout import Layout
from specjax.device.models.model import Model
from specjax.device.placement import DIVIDED, Placement, default_device
from specjax.device.state import EngineState
from specjax.device.verification import Verification
from specjax.device.weights.weight import weights_on
from specjax.engine.compile_progress import compile_progress
from specjax.engine.compiler import FOR_SHAPES, MAX_THREADS, Compiler
from specjax.engine.executables import executables_folder, open_executables
from specjax.engine.metrics import Compilations
from specjax.engine.programs import Begin, Settle
from specjax.engine.replay import filled, measure_rounds, progress_at
from specjax.engine.step_model import empty_state, sizes_of_windows, step_model
from specjax.engine.tracing import JITS, Jits, Program, Static, Traces
from specjax.engine.xla_options import OPTIONS, OPTIONS_BEHIND, collective_options
from specjax.host.speculation.step_cost import StepCost

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Toolchain:
    """The functions and settings with which programs are compiled.

    Attributes:
        make_model: function like `step_model`, which builds the `StepModel` that is compiled into
            steps.
        jits: the jitted programs for each `Static` (the values that are compiled into all programs
            of an engine). Engines with equal `Static`s share programs.
        options: XLA options by platform.
        options_behind: additional XLA options by platform, for programs that no request waits for.
        find_folder: function that returns the folder in which compiled programs are stored. It
            returns None if they are not stored.
        maps_for_shapes: see `Compiler`.
    """

    make_model: Callable[..., StepModel] = step_model
    jits: MutableMapping[Static, Jits] = field(default_factory=lambda: JITS)
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=lambda: OPTIONS)
    options_behind: Mapping[str, Mapping[str, Any]] = field(default_factory=lambda: OPTIONS_BEHIND)
    find_folder: Callable[[], Path | None] = executables_folder
    maps_for_shapes: float = FOR_SHAPES


class CompiledPrograms:
    """Implements `Programs` with JAX. Without a `placement`, arrays are on `default_device`."""

    num_processes = 1

    def __init__(
        self,
        config: EngineConfig,
        target: Model,
        drafter: Drafter,
        verification: Verification,
        params: Params,
        layout: Layout,
        max_drafts: int,
        *,
        placement: Placement | None = None,
        toolchain: Toolchain | None = None,
    ):
        toolchain = toolchain or Toolchain()
        self._placement = placement or Placement.on(default_device())
        platform = self._placement.device.platform
        self._config, self._max_drafts = config, max_drafts
        self._params: Params | None = None
        self.params = params
        if self._placement.num_devices > 1:
            target, drafter = target.local, drafter.local
        self.model = toolchain.make_model(config, target, drafter, verification, platform)
        self.layout = layout
        self._make_state = _state_maker(self._placement, config, self.model, max_drafts)
        self.renew()
        static = Static(self.model, layout)
        weights = jax.tree.unflatten(self._weights_tree, self._weights)
        self._traces = Traces(
            static, config.dtype, weights, self.state, self._placement, toolchain.jits
        )
        self._options = dict(toolchain.options.get(platform, {}))
        if platform == "gpu" and self._placement.num_devices > 1:
            self._options |= collective_options(config.collectives)
        self._options_behind = dict(toolchain.options_behind.get(platform, {}))
        self._executables = None
        folder = toolchain.find_folder()
        if folder and not self._placement.is_here:
            log.info("compiled programs are not kept on disk: they are of several processes")
        elif folder:
            origin = layout, self._traces.shapes, self._options
            self._executables = open_executables(folder, self._placement, self.model, *origin)
        self._compiler = Compiler(self._compile, toolchain.maps_for_shapes)
        self._late: set[Program] = set()  # programs that requests have waited for
        self._no_masks: dict[tuple[int, int], jax.Array] = {}  # masks of all ones, by `masked_rows`

    @property
    def params(self) -> Params:
        """See `Programs`."""
        assert self._params is not None, "it was closed"
        return self._params

    @params.setter
    def params(self, params: Params) -> None:
        if params is not self._params:
            weights = weights_on(self._placement.device.platform, params, self._config.kernels)
            self._weights, self._weights_tree = jax.tree.flatten(weights)
            self._params = params

    @property
    def state(self) -> EngineState:
        """The state of all requests."""
        return jax.tree.unflatten(self._state_tree, self._state)

    @state.setter
    def state(self, state: EngineState) -> None:
        self._state, self._state_tree = jax.tree.flatten(state)

    @property
    def ready(self) -> Collection[Program]:
        """See `Programs`."""
        return self._compiler.ready.keys()

    @property
    def failures(self) -> Mapping[Program, Exception]:
        """See `Programs`."""
        return self._compiler.failures

    @property
    def _read(self) -> Set[Program]:
        """The programs that were read from disk instead of being compiled."""
        return self._executables.read if self._executables else frozenset()

    def are_on_disk(self, programs: Iterable[Program]) -> bool:
        """See `Programs`."""
        stored = self._executables
        missing = (one for one in programs if one not in self.ready)
        return stored is not None and all(map(stored.has, missing))

    @property
    def is_compiling(self) -> bool:
        """See `Programs`."""
        return self._compiler.is_busy

    @property
    def waits_at_conditionals(self) -> bool:
        """See `Programs`. With CUDA graphs, the host never waits at conditionals."""
        is_divided = self._placement.num_devices > 1
        is_on_gpu = self._placement.device.platform == "gpu"
        return is_divided and is_on_gpu and self._config.collectives != "graph"

    def max_deferred(self, batch: int) -> int:
        """See `Programs`."""
        return self.model.max_deferred(batch)

    @property
    def compilations(self) -> Compilations:
        """See `Programs`."""
        num_late = sum(program in self.ready for program in self._late)
        compiler = self._compiler
        return Compilations(len(self.ready), num_late, compiler.num_asked, compiler.seconds)

    def compile_ahead(
        self, programs: Iterable[Program], *, then: Iterable[Program] = (), show_progress: bool
    ) -> None:
        """See `Programs`."""
        asked = list(dict.fromkeys(programs))
        self._compiler.ask(asked, is_urgent=True, num_threads=MAX_THREADS, retries=True)
        self._compiler.ask(then, is_urgent=False, num_threads=MAX_THREADS, is_awaited=True)
        with compile_progress(
            len(asked), show_progress, lambda: len(self._read & set(asked))
        ) as tell:
            self._compiler.wait_for(asked, tell)

    def compile_behind(self, programs: Iterable[Program], *, is_urgent: bool) -> None:
        """See `Programs`."""
        missing = [one for one in dict.fromkeys(programs) if one not in self.ready]
        if is_urgent:
            self._late |= set(missing)
        num_threads = MAX_THREADS if is_urgent else 1
        self._compiler.ask(missing, is_urgent=is_urgent, num_threads=num_threads)

    def finish(self, *, show_progress: bool) -> None:
        """See `Programs`."""
        compiler = self._compiler
        compiler.ask((), is_urgent=False, num_threads=MAX_THREADS, is_awaited=True)
        num_there, num_read = len(self.ready), len(self._read)
        with compile_progress(
            compiler.num_asked, show_progress, lambda: len(self._read) - num_read
        ) as tell:
            while compiler.is_busy:
                compiler.wait(0.5)
                tell(len(self.ready) - num_there)

    def wait(self, seconds: float) -> None:
        """See `Programs`."""
        self._compiler.wait(seconds)

    def run(self, program: Program, *arguments: Any) -> Any:
        """See `Programs`."""
        executable = self._compiler.ready.get(program)
        if executable is None:
            self._late.add(program)
            executable = self._compiler.get(program)
        if isinstance(program, Begin | Settle) and arguments[-1] is None:
            arguments = *arguments[:-1], self._all_ones(program)  # no request has a grammar
        self._state, result = executable(self._weights, self._state, *arguments)
        return result

    def wait_for(self, result: Any) -> None:
        """See `Programs`."""
        jax.block_until_ready(result)

    def elsewhere(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Do nothing: no other process runs these programs. See `Programs`."""

    def time_rounds(
        self, variant: Variant, ks: tuple[int, ...], batches: tuple[int, ...]
    ) -> StepCost:
        """See `Programs`."""
        try:
            return measure_rounds(self, variant, self.layout, self.num_pages, ks, batches)
        finally:
            self.renew()

    @property
    def num_pages(self) -> tuple[int, ...]:
        """The number of pages in each pool.

        The first pool is the main one. The others are for sliding windows with separate pages.
        """
        others = sizes_of_windows(self._config, self.model, self._max_drafts)
        return self._config.num_pages, *(pages for _, pages in others)

    def fill(self) -> None:
        """See `TimedPrograms`."""
        self.state = filled(self.state, self.layout.vocab_size)

    def set_context(self, length: int) -> None:
        """See `TimedPrograms`."""
        self.state = replace(self.state, progress=progress_at(self.state, length))

    def release(self) -> None:
        """See `Programs`."""
        for leaf in self._state:
            leaf.delete()

    def renew(self) -> None:
        """See `Programs`."""
        self.state = self._make_state()

    def close(self) -> None:
        """See `Programs`."""
        self.release()
        self._compiler.close()
        del self._traces, self._state, self._params, self._weights, self._no_masks

    def _compile(self, program: Program, is_urgent: bool) -> Any:
        options = self._options | ({} if is_urgent else self._options_behind)

        def compile() -> Any:
            return self._traces.trace(program).lower().compile(compiler_options=options)

        return self._executables.get(program, compile) if self._executables else compile()

    def _all_ones(self, program: Begin | Settle) -> jax.Array:
        """Return masks that permit every token. They are cached on the device."""
        rows = program.masked_rows
        if rows not in self._no_masks:
            ones = np.full((*rows, self.layout.mask_words), -1, np.int32)
            self._no_masks[rows] = self._placement.put(ones)
        return self._no_masks[rows]


def _state_maker(placement: Placement, *sizes: Any) -> Callable[[], EngineState]:
    """Return a function that makes an engine's empty state on the devices of `placement`.

    The function calls `empty_state(*sizes)`. One program makes all arrays of the state, because
    compiling a program per array shape would take longer.
    """
    make = partial(empty_state, *sizes)
    if placement.num_devices == 1:
        return jax.jit(make, out_shardings=placement.sharding())
    own = jax.shard_map(
        lambda: jax.tree.map(lambda x: x[None], make()),
        mesh=placement.mesh,
        in_specs=(),
        out_specs=DIVIDED,
    )
    return jax.jit(own)
