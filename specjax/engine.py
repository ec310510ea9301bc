"""The loop: launch the next step, then read the one before it.

    schedule -> pack -> step on the device -> copy back, one step late -> commit

While the device runs step N the host plans N + 1. The state never leaves the device: what goes
in is one packed array per step, what comes back is one.
"""

import time
from dataclasses import dataclass

import jax
import numpy as np

from specjax.batch import pack, unpack_outputs
from specjax.config import EngineConfig
from specjax.device.cache.paged import init_pool
from specjax.device.drafters.drafter import Drafter, Params
from specjax.device.models.model import Model
from specjax.device.state import init_state
from specjax.device.step import StepModel
from specjax.host.pages import PageAllocator
from specjax.host.scheduler import DecodePlan, PrefillPlan, Scheduler, Sequence, StepPlan
from specjax.host.speculation.policy import Policy
from specjax.metrics import Metrics, Recorder
from specjax.precompile import Executables
from specjax.request import Request


@dataclass(frozen=True)
class _InFlight:
    plan: StepPlan
    outputs: jax.Array


class Engine:
    """Owns the device state and runs requests, given as token ids, to completion."""

    def __init__(
        self,
        config: EngineConfig,
        target: Model,
        drafter: Drafter,
        params: Params,
        policy: Policy,
        *,
        show_progress: bool = False,
    ):
        self.config = config
        self.params = params
        device = jax.devices()[0]
        dtype = np.dtype(config.dtype)
        # Rows are free where a matmul waits for its weights, and matrix units want them in eights.
        model = StepModel(target, drafter, config.kernels, 8 if device.platform == "gpu" else 1)
        kv = init_pool(
            target.num_layers,
            config.num_pages,
            config.page_size,
            target.num_kv_heads,
            target.head_dim,
            dtype,
        )
        drafter_state = drafter.init_state(
            config.max_num_seqs, config.num_pages, config.page_size, dtype
        )
        self._device = device
        self._state = jax.device_put(init_state(config.max_num_seqs, kv, drafter_state), device)
        self._executables = Executables(params, self._state, model, config.pages_per_seq)
        self.scheduler = Scheduler(
            num_slots=config.max_num_seqs,
            pages=PageAllocator(config.num_pages),
            page_size=config.page_size,
            token_budget=config.max_num_batched_tokens,
            decode_batches=config.decode_batches,
            prefill_widths=config.prefill_widths,
            policy=policy,
        )
        self._recorder = Recorder()
        self._in_flight: _InFlight | None = None
        self._result_time: float | None = None
        self.set_policy(policy, show_progress=show_progress)

    def set_policy(self, policy: Policy, *, show_progress: bool = False) -> None:
        """Choose K by `policy` from the next step on, after compiling what it may ask for."""
        config = self.config
        prefills = [PrefillPlan((), batch, width) for batch, width in config.prefill_shapes]
        decodes = [DecodePlan((), b, k) for k in policy.choices for b in config.decode_batches]
        self._executables.compile_ahead([*prefills, *decodes], show_progress=show_progress)
        self.scheduler.policy = policy

    @property
    def has_work(self) -> bool:
        """Whether any request has not finished."""
        return self.scheduler.has_work or self._in_flight is not None

    def add(self, request: Request) -> None:
        """Queue a request."""
        self.scheduler.add(request)

    def step(self) -> list[Sequence]:
        """Launch a step, then read the one before it; return the requests that it finished."""
        plan = self.scheduler.schedule()
        previous, self._in_flight = self._in_flight, self._launch(plan) if plan else None
        finished = self._read(previous) if previous else []
        if self._in_flight and not self.config.async_scheduling:
            previous, self._in_flight = self._in_flight, None
            finished += self._read(previous)
        return finished

    def reset(self) -> None:
        """Drop all requests, as after an interrupt."""
        self._in_flight = None
        self.scheduler.drop_all()

    def metrics(self) -> Metrics:
        """The counters now."""
        executables = self._executables
        return self._recorder.snapshot(
            num_compilations=executables.num_compilations,
            num_late=executables.num_late,
            compile_seconds=executables.compile_seconds,
        )

    def _launch(self, plan: StepPlan) -> _InFlight:
        packed = pack(plan, self.config.max_num_seqs, self.config.pages_per_seq)
        if self._result_time is not None:
            self._recorder.record_gap(time.perf_counter() - self._result_time)
        self._state, outputs = self._executables.run(
            plan, self.params, self._state, jax.device_put(packed, self._device)
        )
        outputs.copy_to_host_async()
        return _InFlight(plan, outputs)

    def _read(self, step: _InFlight) -> list[Sequence]:
        outputs = unpack_outputs(jax.device_get(step.outputs), step.plan)
        self._result_time = time.perf_counter()
        self._recorder.record_step(step.plan, outputs)
        return self.scheduler.commit(step.plan, outputs)
