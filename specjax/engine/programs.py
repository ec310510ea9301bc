"""The port between an engine and a device: programs of steps, by typed keys.

The device holds the weights and the state between steps. `precompile.py` has the real one, which
compiles; anything that runs the same keys on the same packed arrays can replace it.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from specjax.device.drafters.drafter import Params, Variant
from specjax.device.edits import Processors
from specjax.engine.batch import Part
from specjax.engine.metrics import Compilations
from specjax.host.plans import DecodePlan, PrefillPlan
from specjax.host.speculation.step_cost import StepCost

FEW_LOGPROBS = 20  # likeliest tokens that every step can report


@dataclass(frozen=True, slots=True)
class Admit:
    """Write newly admitted requests to their slots: (admissions) -> None."""

    batch: int


@dataclass(frozen=True, slots=True)
class Restore:
    """Copy snapshots to recurrent states of slots: (moves) -> None."""

    batch: int


@dataclass(frozen=True, slots=True)
class Take:
    """Copy recurrent states of slots to snapshots: (moves) -> None."""

    batch: int


@dataclass(frozen=True, slots=True)
class Prefill:
    """Run the target over a chunk of each prompt: (packed) -> Extension."""

    batch: int
    width: int


@dataclass(frozen=True, slots=True)
class Begin:
    """Drafter observes the chunk, first tokens are sampled.

    (packed, extension, logits, masks) -> outputs, where `logits` are the extension's, or what
    `ProcessFirst` made of them; `masks` is None if no request has a grammar.
    """

    batch: int
    width: int
    variant: Variant


@dataclass(frozen=True, slots=True)
class Decode:
    """A whole round: (packed) -> outputs."""

    batch: int
    k: int
    variant: Variant


@dataclass(frozen=True, slots=True)
class Observe:
    """Drafter observes what rounds without drafts have left to it: (packed) -> None.

    `packed` is that of the last of these rounds, none of which changed the requests.
    """

    batch: int


@dataclass(frozen=True, slots=True)
class Joined:
    """What `Prefill`, `begin` and `decode` do, in one: (packed, packed) -> (outputs, outputs)."""

    begin: Begin
    decode: Decode


@dataclass(frozen=True, slots=True)
class Propose:
    """First piece of a round: (packed) -> Draft. Pieces are compiled only where needed."""

    batch: int
    k: int
    variant: Variant


@dataclass(frozen=True, slots=True)
class Extend:
    """Second piece, during which the host makes masks: (packed, draft) -> Extension."""

    batch: int
    k: int


@dataclass(frozen=True, slots=True)
class Settle:
    """Third piece: (packed, draft, extension, logits, masks) -> outputs; as in `Begin`."""

    batch: int
    k: int
    variant: Variant


@dataclass(frozen=True, slots=True)
class ProcessFirst:
    """Logits processors between `Prefill` and `Begin`: (packed, logits) -> logits."""

    batch: int
    processors: Processors


@dataclass(frozen=True, slots=True)
class ProcessRound:
    """Logits processors between `Extend` and `Settle`: (packed, draft, logits) -> logits."""

    batch: int
    k: int
    processors: Processors


Key: TypeAlias = (
    Admit
    | Restore
    | Take
    | Prefill
    | Begin
    | Decode
    | Observe
    | Joined
    | Propose
    | Extend
    | Settle
    | ProcessFirst
    | ProcessRound
)


class Programs(Protocol):
    """A device with an engine's weights and state, which its programs change in place."""

    @property
    def params(self) -> Params:
        """The weights in use."""
        ...

    @params.setter
    def params(self, params: Params) -> None: ...

    @property
    def compilations(self) -> Compilations:
        """What has been compiled so far."""
        ...

    @property
    def ready(self) -> Collection[Key]:
        """Keys of programs that are compiled; never fewer than before."""
        ...

    @property
    def failures(self) -> Mapping[Key, Exception]:
        """The exceptions of programs that do not compile."""
        ...

    @property
    def is_compiling(self) -> bool:
        """Whether programs are being compiled."""
        ...

    def max_deferred(self, batch: int) -> int:
        """How many rounds of `batch` requests without drafts, `Joined` ones aside, may run before
        `Observe`; 0 if they leave nothing to it."""
        ...

    def compile_ahead(
        self, keys: Iterable[Key], *, then: Iterable[Key] = (), show_progress: bool
    ) -> None:
        """Return when all these are ready; `then` are compiled beside and after them.

        Raises:
            Exception: one of them does not compile.
        """
        ...

    def compile_behind(self, keys: Iterable[Key], *, is_urgent: bool) -> None:
        """Compile these in the background, in their order; urgent ones before all others."""
        ...

    def finish(self, *, show_progress: bool) -> None:
        """Wait until all programs that were asked for are compiled."""
        ...

    def wait(self, seconds: float) -> None:
        """Wait until another program is ready, nothing is left to compile, or the time is over."""
        ...

    def run(self, key: Key, *arguments: Any) -> Any:
        """Launch a program on the state, without waiting for it; compiles it if it is not ready.

        Arguments are results of programs, or NumPy arrays that nothing changes afterwards.
        Outputs have `copy_to_host_async` and `is_ready`, and are read as NumPy arrays.
        """
        ...

    def time_rounds(
        self, variant: Variant, ks: tuple[int, ...], batches: tuple[int, ...]
    ) -> StepCost:
        """Measure times of rounds of every shape by running them; the state is empty afterwards."""
        ...

    def release(self) -> None:
        """Free the memory of the state; nothing runs until `renew`."""
        ...

    def renew(self) -> None:
        """Begin with an empty state."""
        ...

    def close(self) -> None:
        """Free everything, the programs' code included; nothing runs afterwards."""
        ...


def keys_of(plan: Part, variant: Variant, *, is_recurrent: bool, defers: bool) -> list[Key]:
    """The programs that suit a plan best; `defers`: whether rounds without drafts leave
    something to `Observe`."""
    batch = plan.batch
    if isinstance(plan, PrefillPlan):
        keys: list[Key] = [Admit(batch), Prefill(batch, plan.width)]
        keys.append(Begin(batch, plan.width, of_begin(variant)))
        if variant.processors:
            keys.append(ProcessFirst(batch, variant.processors))
        return [*keys, Restore(batch), Take(batch)] if is_recurrent else keys
    variant = of_rounds(variant)
    if is_in_pieces(variant):
        keys = _pieces(plan, Propose(batch, plan.k, of_drafts(variant)), variant)
    else:
        keys = [Decode(batch, plan.k, variant)]
    return [Observe(batch), *keys] if defers and not plan.k else keys


def first_keys_of(plan: Part, variant: Variant, *, is_recurrent: bool, defers: bool) -> list[Key]:
    """Programs that can also run a plan, most of them shared by other variants.

    Rounds are in pieces, and drafters ignore what requests ask of logits: fewer drafts are
    accepted.
    """
    if isinstance(plan, PrefillPlan):
        return keys_of(plan, variant, is_recurrent=is_recurrent, defers=defers)
    keys = _pieces(plan, Propose(plan.batch, plan.k, Variant()), of_rounds(variant))
    return [Observe(plan.batch), *keys] if defers and not plan.k else keys


def _pieces(plan: DecodePlan, propose: Propose, variant: Variant) -> list[Key]:
    batch, k = plan.batch, plan.k
    keys: list[Key] = [propose, Extend(batch, k), Settle(batch, k, of_settle(variant))]
    return [*keys, ProcessRound(batch, k, variant.processors)] if variant.processors else keys


def is_in_pieces(variant: Variant) -> bool:
    """Whether rounds run in pieces, so that variants share the target's."""
    return variant.masks or bool(variant.processors) or variant.num_logprobs > FEW_LOGPROBS


def of_rounds(variant: Variant) -> Variant:
    """The part of a variant that concerns rounds: nothing about prompts."""
    return variant._replace(num_prompt_logprobs=None)


def of_begin(variant: Variant) -> Variant:
    """The part of a variant that is compiled into `Begin`, which takes masks and processed logits.

    The rows of a prompt that are scored run their processors in it.
    """
    scored = variant.num_prompt_logprobs is not None
    return variant._replace(masks=False, processors=variant.processors if scored else ())


def of_settle(variant: Variant) -> Variant:
    """The part of a variant that is compiled into `Settle`, which is as `Begin`."""
    return variant._replace(masks=False, processors=())


def of_drafts(variant: Variant) -> Variant:
    """The part of a variant that concerns drafting: neither reports nor masks."""
    return Variant(variant.processors)


def covers(variant: Variant, needed: Variant) -> bool:
    """Whether a step of `variant` does all that is `needed`. Masks must match: they cost a wait."""
    return (
        set(variant.processors) >= set(needed.processors)
        and variant.masks == needed.masks
        and variant.num_logprobs >= needed.num_logprobs
        and _or_none(variant.num_prompt_logprobs) >= _or_none(needed.num_prompt_logprobs)
    )


def _or_none(count: int | None) -> int:
    return -1 if count is None else count
