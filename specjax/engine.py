"""The loop: launch the next step, then read the one before it.

    schedule -> pack -> step on the device -> copy back, one step late -> commit

While the device runs step N the host plans N + 1. The state never leaves the device: what goes
in is one packed array per step, what comes back is one. A step with grammars is launched in parts,
for the masks of its drafts are made while the target runs over them.
"""

import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from specjax.batch import Layout, pack, pack_admissions, pack_masks, unpack_outputs
from specjax.config import EXACT_WIDTH, EngineConfig
from specjax.device.drafters.drafter import Drafter, Params, Variant
from specjax.device.models.model import Model
from specjax.device.state import init_state
from specjax.device.step import Extension, StepModel
from specjax.device.verification import Draft, SeedExact, Verification
from specjax.host.pages import PageAllocator
from specjax.host.scheduler import DecodePlan, PrefillPlan, Scheduler, StepPlan
from specjax.host.sequence import Sequence
from specjax.host.speculation.policy import Policy
from specjax.metrics import Metrics, Recorder
from specjax.precompile import Executables, covers
from specjax.request import Request
from specjax.sampling_params import LogitsProcessor


@dataclass(frozen=True)
class _InFlight:
    """A step whose outputs are on their way."""

    plan: StepPlan
    variant: Variant
    outputs: jax.Array


@dataclass(frozen=True)
class _Extended:
    """A step that waits for the masks of its drafts."""

    plan: StepPlan
    variant: Variant
    packed: jax.Array
    draft: Draft
    extension: Extension


class Engine:
    """Owns the device state and runs requests, given as token ids, to completion."""

    def __init__(
        self,
        config: EngineConfig,
        target: Model,
        drafter: Drafter,
        params: Params,
        policy: Policy,
        verification: Verification | None = None,
        *,
        show_progress: bool = False,
    ):
        self.config = config
        self.params = params
        self.target = target
        device = jax.devices()[0]
        dtype = np.dtype(config.dtype)
        model = StepModel(
            target,
            drafter,
            verification or SeedExact(),
            config.kernels,
            # Rows are free where a matmul waits for its weights, and matrix units want eights.
            row_multiple=8 if device.platform == "gpu" else 1,
            width_multiple=EXACT_WIDTH if config.exact else 1,
            raw_logprobs=config.logprobs_mode == "raw",
        )
        self._most_drafts = max(policy.choices)
        cache = target.init_cache(
            config.max_num_seqs,
            config.num_pages,
            config.page_size,
            model.width(self._most_drafts),
            dtype,
        )
        drafter_state = drafter.init_state(
            config.max_num_seqs, config.num_pages, config.page_size, dtype
        )
        self._device = device
        state = init_state(
            config.max_num_seqs, config.max_model_len, target.vocab_size, cache, drafter_state
        )
        self._state = jax.device_put(state, device)
        self.layout = Layout(
            config.max_num_seqs, config.max_model_len, config.pages_per_seq, target.vocab_size
        )
        self._executables = Executables(params, self._state, model, self.layout)
        self._processors: list[tuple[LogitsProcessor, ...]] = []
        self.scheduler = Scheduler(
            num_slots=config.max_num_seqs,
            pages=PageAllocator(config.num_pages),
            page_size=config.page_size,
            decode_batches=config.decode_batches,
            prefill_shapes=config.prefill_shapes,
            policy=policy,
            fixed_k=self._most_drafts if config.exact else None,
            shares_prompts=not target.is_recurrent,
        )
        self._max_logprobs = min(config.max_logprobs, target.vocab_size)
        self._recorder = Recorder()
        self._in_flight: _InFlight | None = None
        self._result_time: float | None = None
        self.set_policy(policy, show_progress=show_progress)

    def set_policy(self, policy: Policy, *, show_progress: bool = False) -> None:
        """Choose K by `policy` from the next step on, after compiling what it may ask for.

        Raises:
            ValueError: the policy may choose more drafts than recurrent states were sized for.
        """
        if self.target.is_recurrent and max(policy.choices) > self._most_drafts:
            raise ValueError(
                f"policy: K={max(policy.choices)} does not fit the recurrent cache, whose ring was "
                f"sized for the {self._most_drafts} drafts of num_speculative_tokens when the "
                "engine was built; build it with a larger one"
            )
        self.scheduler.policy = policy
        variants = self._executables.variants or [self._needed([])]
        self._compile_ahead(variants, show_progress=show_progress)

    def prepare(self, requests: Iterable[Request], *, show_progress: bool = False) -> None:
        """Compile what these requests need of a step that has not been needed before."""
        requests = list(requests)
        # Without those with a grammar, the others go on without its masks.
        others = [r for r in requests if r.params.structured_outputs is None]
        have = self._executables.variants
        wanted = {self._needed(group) for group in (requests, others) if group}
        missing = [new for new in wanted if not any(covers(old, new) for old in have)]
        self._compile_ahead(missing, show_progress=show_progress)

    def number_of(self, processors: tuple[LogitsProcessor, ...]) -> int:
        """The engine's number of a row of logits processors; -1 for none."""
        if not processors:
            return -1
        if processors not in self._processors:
            self._processors.append(processors)
        return self._processors.index(processors)

    @property
    def has_work(self) -> bool:
        """Whether any request has not finished."""
        return self.scheduler.has_work or self._in_flight is not None

    def add(self, request: Request) -> None:
        """Queue a request."""
        self.scheduler.add(request)

    def step(self) -> list[Sequence]:
        """Launch a step, then read the one before it; return the samples that it finished."""
        plan = self.scheduler.schedule()
        previous, launched = self._in_flight, self._launch(plan) if plan else None
        finished = self._read(previous) if previous else []
        if isinstance(launched, _Extended):
            launched = self._settle(launched)
        self._in_flight = launched
        if launched and not self.config.async_scheduling:
            self._in_flight = None
            finished += self._read(launched)
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

    def _launch(self, plan: StepPlan) -> "_InFlight | _Extended":
        if self._result_time is not None:
            self._recorder.record_gap(time.perf_counter() - self._result_time)
        needed = self._needed(sequence.request for sequence in plan.sequences)
        variant = self._executables.variant_for(needed)
        packed = self._put(pack(plan, self.layout))
        if isinstance(plan, PrefillPlan):
            self._admit(plan)
            # What stands before a first token is known: nothing.
            masks = self._put(pack_masks(plan, None, self.layout)) if variant.masks else None
            extension = self._run("prefill", plan, variant, packed)
            return self._in(
                plan, variant, self._run("begin", plan, variant, packed, extension, masks)
            )
        if not variant.masks:
            return self._in(plan, variant, self._run("decode", plan, variant, packed))
        draft = self._run("propose", plan, variant, packed)
        draft.tokens.copy_to_host_async()
        extension = self._run("extend", plan, variant, packed, draft)
        extended = _Extended(plan, variant, packed, draft, extension)
        if any(sequence.matcher for sequence in plan.sequences):
            return extended
        return self._settle(extended)

    def _admit(self, plan: PrefillPlan) -> None:
        new = [chunk.sequence for chunk in plan.chunks if chunk.is_first]
        if new:
            packed = self._put(pack_admissions(new, plan.batch, self.layout))
            run = self._executables.get("admit", plan, Variant())
            self._state = run(self._state, packed)

    def _settle(self, step: "_Extended") -> _InFlight:
        drafts = None
        if any(sequence.matcher for sequence in step.plan.sequences):
            drafts = np.asarray(step.draft.tokens)
        masks = self._put(pack_masks(step.plan, drafts, self.layout))
        arguments = step.packed, step.draft, step.extension, masks
        outputs = self._run("settle", step.plan, step.variant, *arguments)
        return self._in(step.plan, step.variant, outputs)

    def _read(self, step: _InFlight) -> list[Sequence]:
        outputs = unpack_outputs(jax.device_get(step.outputs), step.plan, step.variant)
        self._result_time = time.perf_counter()
        num_kept, finished = self.scheduler.commit(step.plan, outputs)
        self._recorder.record_step(step.plan, num_kept)
        return finished

    def _run(self, program: str, plan: StepPlan, variant: Variant, *arguments: Any) -> Any:
        """Launch one of a step's programs, which takes the state and leaves the next one."""
        run = self._executables.get(program, plan, variant)
        self._state, result = run(self.params, self._state, *arguments)
        return result

    def _in(self, plan: StepPlan, variant: Variant, outputs: jax.Array) -> _InFlight:
        outputs.copy_to_host_async()
        return _InFlight(plan, variant, outputs)

    def _put(self, array: np.ndarray) -> jax.Array:
        return jax.device_put(array, self._device)

    def _needed(self, requests: Iterable[Request]) -> Variant:
        """What steps must do for all of `requests`."""
        if self.config.exact:  # the same for all, for another program rounds differently
            return Variant(edits=True, masks=True, num_logprobs=self._max_logprobs)
        numbers: set[int] = set()
        edits = masks = False
        num_logprobs = num_prompt_logprobs = None
        for request in requests:
            params = request.params
            edits |= params.edits_logits
            masks |= params.structured_outputs is not None
            numbers |= {request.processor}
            num_logprobs = self._most(num_logprobs, params.logprobs)
            num_prompt_logprobs = self._most(num_prompt_logprobs, params.prompt_logprobs)
        processors = tuple((n, self._processors[n]) for n in sorted(numbers) if n >= 0)
        return Variant(edits, processors, masks, num_logprobs, num_prompt_logprobs)

    def _most(self, given: int | None, wanted: int | None) -> int | None:
        """How many of the likeliest to report: none, or the most, to keep variants few."""
        if wanted is None:
            return given
        return max(given or 0, self._max_logprobs if wanted else 0)

    def _compile_ahead(self, variants: Collection[Variant], *, show_progress: bool) -> None:
        config, policy = self.config, self.scheduler.policy
        fixed_k = self.scheduler.fixed_k
        ks = policy.choices if fixed_k is None else (fixed_k,)
        prefills = [PrefillPlan((), batch, width) for batch, width in config.prefill_shapes]
        decodes = [DecodePlan((), b, k, k) for k in ks for b in config.decode_batches]
        plans = [*prefills, *decodes]
        self._executables.compile_ahead(plans, variants, show_progress=show_progress)
