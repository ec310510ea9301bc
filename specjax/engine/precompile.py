"""The programs of an engine's steps, one per shape and variant, compiled before they are needed."""

from collections.abc import Callable, Collection, Iterable, Mapping, Set
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from weakref import WeakValueDictionary

import jax
import jax.numpy as jnp
import numpy as np

from specjax.config import EXACT_WIDTH, EngineConfig
from specjax.device.cache.kind import CacheSizes
from specjax.device.drafters.drafter import Drafter, Params, Variant
from specjax.device.inputs import StepModel
from specjax.device.models.model import Model, init_caches, page_windows
from specjax.device.placement import Placement, default_device
from specjax.device.state import EngineState, init_state
from specjax.device.verification import Verification
from specjax.device.weights.weight import weights_on
from specjax.engine.batch import (
    jitted,
    run_admit,
    run_begin,
    run_decode,
    run_extend,
    run_joined,
    run_observe,
    run_prefill,
    run_process_first,
    run_process_round,
    run_propose,
    run_restore,
    run_settle,
    run_take,
)
from specjax.engine.compile_progress import compile_progress
from specjax.engine.compiler import MAX_THREADS, Compiler
from specjax.engine.executables import executables_folder, open_executables
from specjax.engine.layout import Layout
from specjax.engine.metrics import Compilations
from specjax.engine.programs import (
    Admit,
    Begin,
    Decode,
    Extend,
    Joined,
    Key,
    Observe,
    Prefill,
    ProcessFirst,
    ProcessRound,
    Propose,
    Restore,
    Settle,
    Take,
)
from specjax.engine.replay import measure_rounds
from specjax.host.speculation.step_cost import StepCost
from specjax.host.windows import window_pages

GPU_OPTIONS = {
    # No split-K in XLA's own matmuls: it would split most of a step's, each of which then takes
    # another kernel to sum the parts. cuBLAS, which XLA tries as well, may still split.
    "xla_gpu_experimental_force_split_k": 1,
    # XLA gives this pass four fifths of the card, in which weights and pages leave it no room, so
    # that it warns for every program. A step has nothing worth computing twice.
    "xla_disable_hlo_passes": "rematerialization",
}
# So many rows of a drafter take hardly longer than one: as long as reading its weights.
MAX_DEFERRED_ROWS = {"gpu": 64, "cpu": 16}
# Three quarters of the time to compile, and the same times of steps within noise.
CPU_OPTIONS = {"xla_backend_optimization_level": 1}
# Of what no request waits for: the same code, made by one of XLA's threads and not by all.
CPU_OPTIONS_BEHIND = {"xla_cpu_parallel_codegen_split_count": 1}


def step_model(
    config: EngineConfig, target: Model, drafter: Drafter, verification: Verification, platform: str
) -> StepModel:
    """What an engine on a device of `platform` compiles into its steps."""
    return StepModel(
        target,
        drafter,
        verification,
        config.kernels,
        # A matmul bound by its weights runs more rows for free, and matrix units want eights.
        row_multiple=8 if platform == "gpu" else 1,
        width_multiple=EXACT_WIDTH if config.exact else 1,
        logprobs_mode=config.logprobs_mode,
        windows=page_windows(target, config),
        max_deferred_rows=MAX_DEFERRED_ROWS.get(platform, 0),
    )


def matmul_precision(dtype: str, platform: str) -> AbstractContextManager:
    """Products of float32 in float32, unless `jax_default_matmul_precision` asks for another one.

    On a GPU JAX's default rounds the factors to TF32, 10 bits. Logits of programs of different
    shapes would then differ by 2e-3 instead of 4e-5, and drafts would change tokens.
    """
    is_rounded = platform == "gpu" and dtype == "float32"
    if is_rounded and jax.config.values["jax_default_matmul_precision"] is None:
        return jax.default_matmul_precision("highest")
    return nullcontext()


def sizes_of_windows(
    config: EngineConfig, model: StepModel, max_drafts: int
) -> tuple[tuple[int, int], ...]:
    """The windows whose layers have pages of their own, each with their number."""
    return tuple((one, window_pages(config, one, max_drafts)) for one in model.windows)


def empty_state(config: EngineConfig, model: StepModel, max_drafts: int) -> EngineState:
    """The state of an engine without requests, whose steps have up to `max_drafts` drafts."""
    dtype, target = np.dtype(config.dtype), model.target
    rows = model.width(max_drafts)
    kinds, num_snapshots = target.cache_kinds, config.num_snapshots
    pages = sizes_of_windows(config, model, max_drafts)
    sizes = CacheSizes(config.max_num_seqs, config.num_pages, config.page_size, rows, num_snapshots)
    deferred = None
    if model.max_deferred(1):
        num_features = (1 + len(model.drafter.aux_layers)) * target.hidden_size
        deferred = jnp.zeros((model.max_deferred_rows, num_features), dtype)
    return init_state(
        config.max_num_seqs,
        config.max_model_len,
        target.vocab_size,
        init_caches(target, sizes._replace(window_pages=pages), dtype),
        tuple(kind.init_snapshots(num_snapshots, dtype) for kind in kinds),
        model.drafter.init_state(sizes, dtype),
        deferred,
    )


class _Jits(dict):
    """Jitted functions over leaves, by the function of `batch.py` that they run and the trees."""

    def __missing__(self, key: tuple[Callable[..., Any], tuple[Any, Any]]) -> Any:
        self[key] = made = jitted(*key)
        return made


# By `StepModel`, so that engines with equal ones trace once. JAX frees what it compiled for a
# function together with the function: with the last engine of its `StepModel`.
_JITS: WeakValueDictionary[StepModel, _Jits] = WeakValueDictionary()


class CompiledPrograms:
    """`Programs` that JAX compiles, where a placement says; on `default_device` without one."""

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
    ):
        self._placement = placement or Placement.on(default_device())
        platform = self._placement.device.platform
        self.params = params
        self.model = step_model(config, target, drafter, verification, platform)
        self._jits = _JITS.setdefault(self.model, _Jits())
        self._config, self._layout, self._max_drafts = config, layout, max_drafts
        self.renew()
        shapes = jax.tree.map(_shape, (self._weights, self.state))
        self._shapes = [jax.tree.leaves(shape) for shape in shapes]
        self._trees = self._weights_tree, self._state_tree
        self._options = {"gpu": GPU_OPTIONS, "cpu": CPU_OPTIONS}.get(platform, {})
        self._options_behind = CPU_OPTIONS_BEHIND if platform == "cpu" else {}
        self._executables = None
        if folder := executables_folder():
            origin = layout, shapes, self._options
            self._executables = open_executables(folder, self._placement, self.model, *origin)
        self._compiler = Compiler(self._compile)
        self._late: set[Key] = set()  # programs that requests have waited for
        self._no_masks: dict[tuple[int, ...], jax.Array] = {}  # all ones, by shape
        self._calls: dict[type, Callable[[Any], tuple]] = {
            Admit: self._admit,
            Restore: lambda key: (run_restore, (self._ints(key.batch, 3),), {"model": self.model}),
            Take: lambda key: (run_take, (self._ints(key.batch, 3),), {"model": self.model}),
            Prefill: self._prefill,
            Begin: self._begin,
            Decode: self._decode,
            Observe: self._observe,
            Joined: self._joined,
            Propose: self._propose,
            Extend: self._extend,
            Settle: self._settle,
            ProcessFirst: self._process_first,
            ProcessRound: self._process_round,
        }

    @property
    def params(self) -> Params:
        """See `Programs`."""
        return self._params

    @params.setter
    def params(self, params: Params) -> None:
        self._params = params
        weights = weights_on(self._placement.device.platform, params)
        self._weights, self._weights_tree = jax.tree.flatten(weights)

    @property
    def state(self) -> EngineState:
        """The state of all requests."""
        return jax.tree.unflatten(self._state_tree, self._state)

    @state.setter
    def state(self, state: EngineState) -> None:
        self._state, self._state_tree = jax.tree.flatten(state)

    @property
    def ready(self) -> Collection[Key]:
        """See `Programs`."""
        return self._compiler.ready.keys()

    @property
    def failures(self) -> Mapping[Key, Exception]:
        """See `Programs`."""
        return self._compiler.failures

    @property
    def _read(self) -> Set[Key]:
        """Those that were read from the folder of kept programs."""
        return self._executables.read if self._executables else frozenset()

    @property
    def is_compiling(self) -> bool:
        """See `Programs`."""
        return self._compiler.is_busy

    def max_deferred(self, batch: int) -> int:
        """See `Programs`."""
        return self.model.max_deferred(batch)

    @property
    def compilations(self) -> Compilations:
        """See `Programs`."""
        num_late = sum(key in self.ready for key in self._late)
        compiler = self._compiler
        return Compilations(len(self.ready), num_late, compiler.num_asked, compiler.seconds)

    def compile_ahead(
        self, keys: Iterable[Key], *, then: Iterable[Key] = (), show_progress: bool
    ) -> None:
        """See `Programs`."""
        keys = list(dict.fromkeys(keys))
        self._compiler.ask(keys, is_urgent=True, num_threads=MAX_THREADS, retries=True)
        self._compiler.ask(then, is_urgent=False, num_threads=MAX_THREADS, is_awaited=True)
        with compile_progress(
            len(keys), show_progress, lambda: len(self._read & set(keys))
        ) as tell:
            self._compiler.wait_for(keys, tell)

    def compile_behind(self, keys: Iterable[Key], *, is_urgent: bool) -> None:
        """See `Programs`."""
        missing = [key for key in dict.fromkeys(keys) if key not in self.ready]
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

    def run(self, key: Key, *arguments: Any) -> Any:
        """See `Programs`."""
        program = self._compiler.ready.get(key)
        if program is None:
            self._late.add(key)
            program = self._compiler.get(key)
        if isinstance(key, Begin | Settle) and arguments[-1] is None:  # no request has a grammar
            arguments = *arguments[:-1], self._all_ones(key)
        self._state, result = program(self._weights, self._state, *arguments)
        return result

    def time_rounds(
        self, variant: Variant, ks: tuple[int, ...], batches: tuple[int, ...]
    ) -> StepCost:
        """See `Programs`."""
        try:
            others = sizes_of_windows(self._config, self.model, self._max_drafts)
            num_pages = self._config.num_pages, *(pages for _, pages in others)
            return measure_rounds(self, variant, self._layout, num_pages, ks, batches)
        finally:
            self.renew()

    def release(self) -> None:
        """See `Programs`."""
        for leaf in self._state:
            leaf.delete()

    def renew(self) -> None:
        """See `Programs`."""
        self.state = self._placement.put(empty_state(self._config, self.model, self._max_drafts))

    def close(self) -> None:
        """See `Programs`."""
        self.release()
        self._compiler.close()
        del self._jits, self._calls, self._state, self._params, self._weights, self._no_masks

    def _compile(self, key: Key, is_urgent: bool) -> Any:
        options = self._options | ({} if is_urgent else self._options_behind)

        def compile() -> Any:
            return self._trace(key).lower().compile(compiler_options=options)

        return self._executables.get(key, compile) if self._executables else compile()

    def _trace(self, key: Key) -> Any:
        run, arguments, static = self._calls[type(key)](key)
        with matmul_precision(self._config.dtype, self._placement.device.platform):
            return self._jits[run, self._trees].trace(*self._shapes, *arguments, **static)

    def _result(self, key: Key) -> Any:
        """Shapes of the result that a program hands to the next."""
        return self._trace(key).out_info[1]

    def _admit(self, key: Admit) -> tuple:
        return (
            run_admit,
            (self._ints(*self._layout.admit_shape(key.batch)),),
            {"layout": self._layout},
        )

    def _prefill(self, key: Prefill) -> tuple:
        packed = self._ints(*self._layout.prefill_shape(key.batch))
        return run_prefill, (packed,), {"model": self.model, "width": key.width}

    def _begin(self, key: Begin) -> tuple:
        packed = self._ints(*self._layout.prefill_shape(key.batch))
        extension = self._result(Prefill(key.batch, key.width))
        arguments = packed, extension, extension.logits, self._ints(*self._mask_shape(key))
        return run_begin, arguments, {"model": self.model, "variant": key.variant}

    def _decode(self, key: Decode) -> tuple:
        packed = self._ints(*self._layout.decode_shape(key.batch))
        return run_decode, (packed,), {"model": self.model, "variant": key.variant, "k": key.k}

    def _observe(self, key: Observe) -> tuple:
        packed = self._ints(*self._layout.decode_shape(key.batch))
        return run_observe, (packed,), {"model": self.model}

    def _joined(self, key: Joined) -> tuple:
        begin, decode = key.begin, key.decode
        packed = self._ints(*self._layout.prefill_shape(begin.batch))
        packed_round = self._ints(*self._layout.decode_shape(decode.batch))
        static = {
            "model": self.model,
            "width": begin.width,
            "chunk_variant": begin.variant,
            "variant": decode.variant,
            "k": decode.k,
        }
        return run_joined, (packed, packed_round), static

    def _propose(self, key: Propose) -> tuple:
        packed = self._ints(*self._layout.decode_shape(key.batch))
        return run_propose, (packed,), {"model": self.model, "variant": key.variant, "k": key.k}

    def _extend(self, key: Extend) -> tuple:
        packed = self._ints(*self._layout.decode_shape(key.batch))
        draft = self._result(Propose(key.batch, key.k, Variant()))
        return run_extend, (packed, draft), {"model": self.model}

    def _settle(self, key: Settle) -> tuple:
        packed = self._ints(*self._layout.decode_shape(key.batch))
        draft = self._result(Propose(key.batch, key.k, Variant()))
        extension = self._result(Extend(key.batch, key.k))
        masks = self._ints(*self._mask_shape(key))
        arguments = packed, draft, extension, extension.logits, masks
        return run_settle, arguments, {"model": self.model, "variant": key.variant}

    def _process_first(self, key: ProcessFirst) -> tuple:
        packed = self._ints(*self._layout.prefill_shape(key.batch))
        logits = self._logits(key.batch, 1)
        return run_process_first, (packed, logits), {"processors": key.processors}

    def _process_round(self, key: ProcessRound) -> tuple:
        packed = self._ints(*self._layout.decode_shape(key.batch))
        draft = self._result(Propose(key.batch, key.k, Variant()))
        logits = self._logits(key.batch, key.k + 1)
        return run_process_round, (packed, draft, logits), {"processors": key.processors}

    def _mask_shape(self, key: Begin | Settle) -> tuple[int, int, int]:
        num_rows = key.k + 1 if isinstance(key, Settle) else 1
        return key.batch, num_rows, self._layout.mask_words

    def _all_ones(self, key: Begin | Settle) -> jax.Array:
        """Masks that permit every token, which stay on the device."""
        shape = self._mask_shape(key)
        if shape not in self._no_masks:
            self._no_masks[shape] = self._placement.put(np.full(shape, -1, np.int32))
        return self._no_masks[shape]

    def _logits(self, batch: int, num_rows: int) -> jax.ShapeDtypeStruct:
        shape = batch, num_rows, self._layout.vocab_size
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=self._placement.sharding())

    def _ints(self, *shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.int32, sharding=self._placement.sharding())


def _shape(x: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
