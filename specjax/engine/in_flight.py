"""Describes chunks and rounds in flight: the host has launched them, but not read the results."""

import time
from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from itertools import repeat

import jax
import numpy as np

from specjax.device.drafters.drafter import Variant
from specjax.device.models.model import Features
from specjax.device.step import Extension
from specjax.device.verification import Draft
from specjax.engine.batch import Part
from specjax.engine.port import Programs
from specjax.engine.programs import Joined
from specjax.host.drafts.suggester import is_used
from specjax.host.plans import DecodePlan
from specjax.host.sequence import RowOutput
from specjax.host.speculation.acceptance import DraftOutcome
from specjax.host.speculation.contexts import context_buckets
from specjax.host.speculation.requests import RequestOutcomes
from specjax.host.speculation.rounds import Round


@dataclass
class InFlight:
    """Chunks or a round in flight: the host has launched them, but not read the results yet."""

    plan: Part
    variant: Variant
    outputs: jax.Array
    start: float  # when planning of the step began, in seconds of `time.perf_counter`
    launched: float  # the time just before its programs were launched
    done: float | None = None  # when its outputs were first seen to be ready
    features: Features | None = None  # of the chunks' rows, if a request exports features
    joins: Joined | None = None  # a program, not ready yet, for the step's chunks and this round
    rest: DecodePlan | None = None  # the part that does not draft, if it ran in this program
    shares_program: bool = False  # whether the step's previous part ran in the same program

    def outcome(
        self, rows: SequenceOf[RowOutput], num_kept: list[int], milliseconds: float | None
    ) -> Round:
        """Return the outcome of a round, after its tokens were appended to its sequences.

        If the program also ran sequences that did not draft (`self.rest`), their tokens must be
        appended after this call.

        If the drafter found fewer than K drafts, the first missing draft counts as rejected.
        Requests whose drafts came from texts are left out.

        Args:
            rows: the device's results for each sequence.
            num_kept: the number of tokens that each sequence gained.
            milliseconds: the time of the round; None if unknown. If the round had fewer drafts than
                its shape, the outcome has no time, since the program ran with a larger K.
        """
        plan = self.plan
        assert isinstance(plan, DecodePlan)
        k = plan.num_drafts
        keys, drafts, accepted, groups, lengths, num_context = [], [], [], [], [], 0
        paths = plan.suggested or repeat(None)
        for sequence, kept, row, path in zip(plan.sequences, num_kept, rows, paths, strict=False):
            if not kept:
                continue
            length = len(sequence.token_ids)
            num_context += length - kept
            if path is not None and is_used(path, sequence, kept):
                continue  # what the drafter achieves is learned from its own drafts
            if (num_drafts := row.num_drafts) != k or sequence.finish_reason is not None:
                num_drafts = sequence.num_usable(k, kept)
            keys.append(sequence.rank)
            drafts.append(num_drafts)
            accepted.append(kept - 1)
            groups.append(sequence.request.group)
            lengths.append(length)
        found = Counter(zip(drafts, accepted, groups, context_buckets(lengths), strict=True))
        others = self.rest.sequences if self.rest else ()
        return Round(
            plan.batch,
            k,
            num_context,
            {DraftOutcome(*outcome): count for outcome, count in found.items()},
            milliseconds if plan.k == k else None,
            RequestOutcomes(keys, drafts, accepted),
            others=self.rest.batch if self.rest else 0,
            others_context=sum(len(sequence.token_ids) for sequence in others),
        )

    def look(self) -> None:
        """Set `done` to the current time if the outputs have become ready."""
        is_ready = self.outputs.is_ready()  # pyright: ignore[reportAttributeAccessIssue]
        if self.done is None and is_ready:
            self.done = time.perf_counter()


@dataclass(frozen=True)
class Extended:
    """A round whose programs were launched, except `Settle`, which verifies the drafts."""

    plan: DecodePlan
    variant: Variant
    packed: np.ndarray
    draft: Draft
    extension: Extension
    logits: jax.Array  # the extension's logits, after logits processors
    launched: float  # see `InFlight`

    @property
    def has_grammar(self) -> bool:
        """Whether a grammar must see the drafts before `Settle` is launched."""
        return any(sequence.matcher for sequence in self.plan.sequences)

    def wait(self, programs: Programs) -> None:
        """Wait for the drafts if a grammar must see them."""
        if self.has_grammar:
            programs.wait_for(self.draft.tokens)


def note_ends(previous: Iterable[InFlight], launched: list[InFlight | Extended]) -> None:
    """Set the end time `done` of programs that had ended before a later program was launched.

    On a CPU, a launch may return only after the launched program has ended. In this case, all
    earlier programs had ended before the launch.
    """
    programs = [step for step in launched if isinstance(step, InFlight)]
    for step in programs:
        if step.done is None:
            continue
        for earlier in (*previous, *programs):
            if earlier.launched < step.launched:
                earlier.done = min(step.launched, earlier.done or step.launched)
