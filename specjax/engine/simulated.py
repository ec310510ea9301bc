"""A simulated device, which computes no model: `LLM(..., device="simulated")`.

With it, one can measure the time of everything except the model. The token at a position is the
same in all requests, and all drafts are accepted, except drafts that a grammar forbids. Limits and
stop tokens end a text as usual. Grammars replace tokens that they do not allow. All other sampling
parameters have no effect, and all log-probabilities are 0. Weights are loaded, but not used.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar, NamedTuple

import numpy as np

from specjax.config import EngineConfig
from specjax.device.drafters.drafter import Params, Variant
from specjax.device.inputs import AdmitInputs, DecodeInputs, PrefillInputs
from specjax.device.layout import Layout
from specjax.engine.metrics import Compilations
from specjax.engine.programs import (
    Admit,
    Begin,
    Decode,
    Extend,
    Joined,
    Observe,
    Prefill,
    ProcessFirst,
    ProcessRound,
    Propose,
    Restore,
    Settle,
    SplitRound,
    Take,
)
from specjax.engine.tracing import Program
from specjax.host.speculation.step_cost import StepCost

_STRIDE = 7919  # a prime, so that neighbouring tokens differ
_MAX_K = 64


class HostResult(NamedTuple):
    """An array on the host, with the methods of a `jax.Array` that the engine calls."""

    array: np.ndarray

    def copy_to_host_async(self) -> None:
        """Do nothing."""

    def is_ready(self) -> bool:
        """Return True."""
        return True

    def __array__(self, *arguments: Any, **options: Any) -> np.ndarray:
        return self.array


class SimulatedDraft(NamedTuple):
    """The drafts of a round."""

    tokens: HostResult  # i32[B, K]


class SimulatedExtension(NamedTuple):
    """Takes the place of the target's hidden states and logits, which are not computed."""

    features: None = None
    logits: None = None


class SimulatedPrograms:
    """Implements `Programs` with NumPy.

    The arguments are those that `CompiledPrograms` takes, without `toolchain`.
    """

    num_processes: ClassVar[int] = 1
    is_compiling: ClassVar[bool] = False
    waits_at_conditionals: ClassVar[bool] = False
    failures: ClassVar[Mapping[Program, Exception]] = {}

    def __init__(
        self,
        config: EngineConfig,
        target: Any,
        drafter: Any,
        verification: Any,
        params: Params,
        layout: Layout,
        max_drafts: int,
        *,
        placement: Any = None,
    ):
        self.params, self._layout = params, layout
        self._has_raw = config.logprobs_mode == "both"
        self.ready: set[Program] = set()
        # Tokens are from the middle of the vocabulary: special tokens are often first or last.
        first, count = layout.vocab_size // 4, max(layout.vocab_size // 2, 1)
        places = np.arange(layout.max_model_len + _MAX_K)
        self._text = (first + places * _STRIDE % count).astype(np.int32)
        self._runs: Mapping[type, Callable[..., Any]] = {
            Admit: self._admit,
            Restore: _nothing,
            Take: _nothing,
            Observe: _nothing,
            Prefill: lambda *_: SimulatedExtension(),
            Extend: lambda *_: SimulatedExtension(),
            ProcessFirst: _nothing,
            ProcessRound: _nothing,
            Begin: self._begin,
            Decode: self._decode,
            Joined: self._joined,
            SplitRound: self._split_round,
            Propose: self._propose,
            Settle: self._settle,
        }
        self.renew()

    @property
    def compilations(self) -> Compilations:
        """See `Programs`."""
        return Compilations(len(self.ready), 0, 0, 0.0)

    def are_on_disk(self, programs: Iterable[Program]) -> bool:
        """See `Programs`."""
        return False

    def max_deferred(self, batch: int) -> int:
        """See `Programs`."""
        return 0

    def compile_ahead(
        self, programs: Iterable[Program], *, then: Iterable[Program] = (), show_progress: bool
    ) -> None:
        """See `Programs`."""
        self.ready |= {*programs, *then}

    def compile_behind(self, programs: Iterable[Program], *, is_urgent: bool) -> None:
        """See `Programs`."""
        self.ready |= set(programs)

    def finish(self, *, show_progress: bool) -> None:
        """See `Programs`."""

    def wait(self, seconds: float) -> None:
        """See `Programs`."""

    def run(self, program: Program, *arguments: Any) -> Any:
        """See `Programs`."""
        kinds = program.packed
        inputs = [
            self._layout.packing(kind).views(packed)
            for (kind, _), packed in zip(kinds, arguments, strict=False)
        ]
        return self._runs[type(program)](program, *inputs, *arguments[len(kinds) :])

    def wait_for(self, result: Any) -> None:
        """See `Programs`."""

    def elsewhere(self, function: Callable[..., Any], *arguments: Any) -> None:
        """See `Programs`. This does nothing, because there are no other processes."""

    def time_rounds(
        self, variant: Variant, ks: tuple[int, ...], batches: tuple[int, ...]
    ) -> StepCost:
        """Return made-up times: 1 ms per round, plus 0.1 ms for each of batch * (K + 1) rows."""
        return StepCost({b: {k: 1 + 0.1 * b * (k + 1) for k in ks} for b in batches})

    def release(self) -> None:
        """See `Programs`."""

    def renew(self) -> None:
        """See `Programs`. Arrays have an entry per resident request, and one for padding rows."""
        count = self._layout.num_slots + 1
        self._lengths = np.zeros(count, np.int32)  # tokens whose keys and values are cached
        self._limits = np.zeros(count, np.int32)
        self._is_active = np.zeros(count, bool)
        self._stop_ids: np.ndarray | None = None  # [slots + 1, ids]

    def close(self) -> None:
        """See `Programs`."""

    def _admit(self, program: Admit, admitted: AdmitInputs) -> None:
        slots, requests = np.asarray(admitted.slots), admitted.requests
        stop_ids = np.asarray(requests.stop_ids)
        if self._stop_ids is None:
            self._stop_ids = np.full((len(self._limits), stop_ids.shape[1]), -1, np.int32)
        self._limits[slots], self._stop_ids[slots] = np.asarray(requests.limits), stop_ids
        self._is_active[slots] = False

    def _begin(
        self, program: Begin, chunks: PrefillInputs, extension: Any, logits: Any, masks: Any
    ) -> HostResult:
        slots, ends = np.asarray(chunks.slots), np.asarray(chunks.starts) + chunks.counts
        is_last, is_resumed = np.asarray(chunks.is_last) > 0, np.asarray(chunks.is_resumed) > 0
        is_real = slots < self._layout.num_slots
        tokens = self._following(ends - 1, 1, masks)
        has_token = is_real & is_last & ~is_resumed
        is_over = self._stops(slots, tokens)[:, 0] | (self._limits[slots] - ends <= 1)
        self._lengths[slots] = ends
        self._is_active[slots] = is_real & is_last & (is_resumed | ~is_over)
        zeros = np.zeros(len(slots), np.int32)
        return self._packed(program.variant, program.width, has_token, zeros, tokens)

    def _decode(self, program: Decode, inputs: DecodeInputs) -> HostResult:
        return self._round(program.variant, program.k, inputs)

    def _propose(self, program: Propose, inputs: DecodeInputs) -> SimulatedDraft:
        starts = self._lengths[np.asarray(inputs.slots)]
        return SimulatedDraft(HostResult(self._following(starts, program.k, None)))

    def _settle(
        self,
        program: Settle,
        inputs: DecodeInputs,
        draft: SimulatedDraft,
        extension: Any,
        logits: Any,
        masks: Any,
    ) -> HostResult:
        return self._round(program.variant, program.k, inputs, draft, masks)

    def _joined(
        self, program: Joined, chunks: PrefillInputs, inputs: DecodeInputs
    ) -> tuple[HostResult, HostResult]:
        decoded = self._decode(program.decode, inputs)  # before new requests become active
        return self._begin(program.begin, chunks, None, None, None), decoded

    def _split_round(
        self, program: SplitRound, drafting: DecodeInputs, others: DecodeInputs
    ) -> tuple[HostResult, HostResult]:
        variant = program.variant
        return self._round(variant, program.shape.k, drafting), self._round(variant, 0, others)

    def _round(
        self,
        variant: Variant,
        k: int,
        inputs: DecodeInputs,
        draft: SimulatedDraft | None = None,
        masks: np.ndarray | None = None,
    ) -> HostResult:
        slots, columns = np.asarray(inputs.slots), np.arange(k + 1)
        starts = self._lengths[slots]
        remaining = self._limits[slots] - starts - 1
        num_drafts = np.minimum(np.asarray(inputs.num_drafts), remaining - 1).clip(0, k)
        num_drafts[~self._is_active[slots]] = 0
        tokens = self._following(starts, k + 1, masks)
        counts = np.where(self._is_active[slots], num_drafts + 1, 0)
        if draft is not None and masks is not None:  # masks may have replaced drafts
            is_accepted = tokens[:, :k] == draft.tokens.array
            counts = np.minimum(counts, 1 + is_accepted.cumprod(axis=1).sum(axis=1))
        is_stop = self._stops(slots, tokens) & (columns < counts[:, None])
        has_stop = is_stop.any(axis=1)
        self._lengths[slots] = starts + counts
        counts = np.where(has_stop, is_stop.argmax(axis=1) + 1, counts)
        self._is_active[slots] &= ~has_stop & (counts < remaining)
        return self._packed(variant, 0, counts, num_drafts, tokens)

    def _following(self, places: np.ndarray, count: int, masks: np.ndarray | None) -> np.ndarray:
        """Return the tokens i32[B, count] at the `count` positions after each position in `places`.

        `masks` i32[B, count, words] are grammar masks. If a mask forbids a token, the first token
        that the mask allows is returned instead.
        """
        places = places[:, None] + 1 + np.arange(count)
        tokens = self._text[places.clip(0, len(self._text) - 1)]
        if masks is None:
            return tokens
        words = np.take_along_axis(masks, (tokens // 32)[:, :, None], axis=2)[:, :, 0]
        for place in np.argwhere(~(words >> tokens % 32) & 1):
            bits = np.unpackbits(masks[tuple(place)].view(np.uint8), bitorder="little")
            tokens[tuple(place)] = bits.argmax()
        return tokens

    def _stops(self, slots: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """Return bool[B, N]: whether each of `tokens` i32[B, N] is a stop token of its request."""
        if self._stop_ids is None:
            return np.zeros(tokens.shape, bool)
        return (tokens[:, :, None] == self._stop_ids[slots][:, None]).any(axis=2)

    def _packed(
        self,
        variant: Variant,
        width: int,
        counts: np.ndarray,
        num_drafts: np.ndarray,
        tokens: np.ndarray,
    ) -> HostResult:
        """Return outputs in the packed form of `batch.pack_outputs`. Log-probabilities are 0."""
        parts = [counts[:, None], num_drafts[:, None], tokens]
        for rows, top in (
            (tokens.shape[1], variant.num_logprobs),
            (width, variant.num_prompt_logprobs),
        ):
            if top is not None:
                columns = rows * (2 + 2 * top + self._has_raw)
                parts.append(np.zeros((len(tokens), columns), np.int32))
        return HostResult(np.concatenate(parts, axis=1, dtype=np.int32))


def _nothing(program: Program, inputs: Any, *handed: Any) -> Any:
    """Compute nothing: return the last of the arguments `handed`, or None if there are none."""
    return handed[-1] if handed else None
