"""Decides which shapes and variants of steps an engine can run now, and which to compile.

A step has a shape and a variant. A variant is a set of request options, such as log-probabilities,
that the step's programs support. Without `compile_ahead`, an engine begins with one shape for
chunks, one shape for rounds, and a variant that serves most requests. If the host waits at
conditionals (see `Programs.waits_at_conditionals`), there is also a variant without optional work.
The two shapes suffice for any step, but small steps need much padding, and chunks may need more
steps than in another shape. For each shape that is not compiled, the time that steps lose without
it is added up. The shape is compiled in the background once this time is about the time that
compiling takes. If the programs of the shape are on disk, they are read much sooner. Requests that
need a new variant wait until it is compiled; other requests do not wait.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Set
from typing import NamedTuple

from specjax.checks import warn
from specjax.config import EngineConfig
from specjax.device.drafters.drafter import Variant
from specjax.engine.batch import Part
from specjax.engine.port import Programs
from specjax.engine.programs import Joined, SplitRound
from specjax.engine.tracing import Program
from specjax.engine.variants import (
    FEW_LOGPROBS,
    covers,
    first_programs_of,
    is_in_pieces,
    of_rounds,
    programs_of,
)
from specjax.host.plans import DecodePlan, PrefillPlan
from specjax.host.request import Demands
from specjax.host.shapes import Shape, Shapes, num_rows
from specjax.host.speculation.rounds import SplitShape, SplitWish
from specjax.sampling_params import LogitsProcessor

PATIENCE_MS = 3000.0  # time that steps may lose before a better shape is compiled
READING_MS = 100.0  # time that steps may lose before a better shape is read from disk
PIECES_LOSE = 0.05  # a round that runs as several programs loses about this fraction of its time
JOINED_SAVES = 0.5  # `Joined` saves about this fraction of the shorter time, of chunks or round


_PLAIN = Demands(edits=False, masks=False, processor=-1, logprobs=None, prompt_logprobs=None)


class Ready(NamedTuple):
    """The shapes and split rounds whose programs are compiled for requests with certain demands.

    In a split round, only some requests draft.
    """

    shapes: Shapes  # the engine's `Shapes` itself if every shape is compiled
    splits: dict[SplitShape, SplitRound]


class Repertoire:
    """Decides in which shapes and variants steps can run now, and which programs to compile.

    A variant is a set of request options that programs support.
    """

    def __init__(
        self, programs: Programs, config: EngineConfig, vocab_size: int, *, is_recurrent: bool
    ):
        self.variants: list[Variant] = []  # asked for so far; the first has the fewest options
        self.patience_ms = PATIENCE_MS
        self._programs, self._config, self._is_recurrent = programs, config, is_recurrent
        # At least one: with zero, XLA would turn the conditional for log-probabilities into a
        # select, which always computes them.
        self._max_logprobs = max(1, min(config.max_logprobs, vocab_size))
        self._processors: list[tuple[LogitsProcessor, ...]] = []
        # Time lost without the programs of a better shape.
        self._lost_ms: defaultdict[tuple[Program, ...], float] = defaultdict(float)
        self._on_disk: dict[tuple[Program, ...], bool] = {}  # whether they need only be read
        self._num_ready = -1  # number of ready programs when the caches below were filled
        self._asked: dict[frozenset[Demands], Variant] = {}
        self._compiled: dict[Variant, Ready] = {}
        self._chosen: dict[tuple[type, Shape, Variant], Variant] = {}

    def number_of(self, processors: tuple[LogitsProcessor, ...]) -> int:
        """Return the number that identifies a list of logits processors.

        An unknown list gets a new number. The number of an empty list is -1.
        """
        if not processors:
            return -1
        if processors not in self._processors:
            self._processors.append(processors)
        return self._processors.index(processors)

    def asked_by(self, all_demands: Iterable[Demands]) -> Variant:
        """Return the variant (set of request options) that requests with `all_demands` need."""
        all_demands = frozenset(all_demands)
        if all_demands not in self._asked:
            self._asked[all_demands] = self._find_asked(all_demands)
        return self._asked[all_demands]

    def _find_asked(self, all_demands: Set[Demands]) -> Variant:
        max_logprobs = self._max_logprobs
        if self._config.exact:  # the same variant for all steps: other programs round differently
            return Variant(masks=True, num_logprobs=max_logprobs)
        if self._programs.waits_at_conditionals and all_demands <= {_PLAIN}:
            return Variant(is_plain=True)
        numbers = sorted({demands.processor for demands in all_demands} - {-1})
        # Numbers are rounded up to `few` or the maximum, so that there are few variants.
        few = min(FEW_LOGPROBS, max_logprobs)
        asks_many = any((demands.logprobs or 0) > few for demands in all_demands)
        of_prompts = [d.prompt_logprobs for d in all_demands if d.prompt_logprobs is not None]
        return Variant(
            processors=tuple((number, self._processors[number]) for number in numbers),
            masks=any(demands.masks for demands in all_demands),
            num_logprobs=max_logprobs if asks_many else few,
            num_prompt_logprobs=(max_logprobs if any(of_prompts) else 0) if of_prompts else None,
        )

    def compile_first(self, shapes: Shapes, *, show_progress: bool) -> bool:
        """Compile programs for `shapes.first`, and wait for them.

        With the option `compile_ahead`, compile programs for all of `shapes`. In the first call,
        the programs support the usual variants; later, all known variants. Return whether the
        fastest programs of the first variant are ready for all of `shapes`.
        """
        usual = self.asked_by({_PLAIN}), self.asked_by({_PLAIN._replace(edits=True)})
        variants = self.variants or list(dict.fromkeys(usual))
        self._compile(variants, shapes, show_progress=show_progress)
        self.variants = variants
        best = self._programs_for_shapes(programs_of, variants[:1], shapes)
        return all(program in self._programs.ready for program in best)

    def use(self, shapes: Shapes) -> None:
        """Set the shapes that steps can have."""
        self.all_shapes = shapes
        self._forget()

    def prepare(self, variant: Variant, *, show_progress: bool) -> None:
        """Compile the programs of a variant (a set of request options) in the background.

        With the option `compile_ahead`, wait for them. Do nothing if a known variant supports the
        same options.
        """
        if any(covers(known, variant) for known in self.variants):
            return
        if not self._config.compile_ahead:
            self._ask(variant)
            return
        self._compile([variant], self.all_shapes, show_progress=show_progress)
        self.variants.append(variant)
        self._forget()

    def ask_for(self, shape: Shape) -> None:
        """Compile the programs for rounds of this shape in the background."""
        needed = self._programs_for_shapes(programs_of, self.variants[:1], Shapes((), (shape,)))
        self._programs.compile_behind(needed, is_urgent=False)

    def admits(self, all_demands: Iterable[Demands]) -> bool:
        """Return whether requests with `all_demands` can run together now.

        If they cannot, compile the missing programs in the background.

        Raises:
            Exception: a program that the requests need failed to compile.
        """
        asked, shapes = self.asked_by(all_demands), self.ready_for(all_demands).shapes
        if shapes.prefill and shapes.decode:
            return True
        failures = self._programs.failures
        for variant in self._covering(asked):
            for program in self._programs_for_shapes(
                first_programs_of, [variant], self.all_shapes.first
            ):
                if program in failures:
                    self.variants.remove(variant)
                    self._forget()
                    raise failures[program]
        if not self._covering(asked):
            self._ask(asked)
        return False

    def variant_for(self, plan: Part, all_demands: Iterable[Demands]) -> Variant:
        """Return the variant in which to run a plan, whose requests have `all_demands`.

        A variant is a set of request options, such as log-probabilities. The result includes all
        options that the requests need. If possible, it is a known variant whose programs are
        compiled for the plan's shape. Otherwise, it is any known variant, or else a new variant.
        """
        self._look()
        asked = self.asked_by(all_demands)
        if isinstance(plan, DecodePlan):
            known = DecodePlan, (plan.batch, plan.k), asked
        else:
            known = PrefillPlan, (plan.batch, plan.width), asked
        if known not in self._chosen:
            covering = self._covering(asked)
            there = (variant for variant in covering if self._has(plan, [variant]))
            chosen = next(there, covering[0] if covering else asked)
            self._chosen[known] = of_rounds(chosen) if known[0] is DecodePlan else chosen
        return self._chosen[known]

    def note(self, plan: Part, variant: Variant, milliseconds: float) -> None:
        """Record how much time a plan lost because faster programs are not compiled yet.

        `plan.better_shape` is a shape in which the plan would be faster. `plan.wish` is a faster
        split round, in which only some requests draft. Each field may be None. The faster programs
        are compiled in the background once their absence has cost too much time.
        """
        if isinstance(plan, DecodePlan) and plan.wish is not None:
            self._note_wish(plan.wish, variant, milliseconds)
        if plan.better_shape is None:
            return
        if isinstance(plan, DecodePlan):
            own = DecodePlan((), *plan.better_shape, 0)
            part = num_rows(plan.better_shape) / num_rows((plan.batch, plan.k))
        else:
            own = PrefillPlan((), *plan.better_shape)
            part = own.batch * own.width / (plan.batch * plan.width)
            part *= plan.num_tokens / max(plan.num_tokens, plan.better_tokens)  # fewer steps
        needed = self._programs_for(programs_of, own, variant)
        self._add_loss(needed, max(PIECES_LOSE, 1 - part) * milliseconds)

    def note_apart(self, program: Joined, milliseconds: float) -> None:
        """Record that chunks and a round ran separately, because `program` was not ready.

        `program` runs the chunks and the round together. `milliseconds` is the shorter of the
        chunks' time and the round's time. Compile `program` in the background once its absence
        has cost too much time. With the option `compile_ahead`, do nothing. Every pair of shapes
        has such a program, and these programs are too many to compile ahead.
        """
        if self._config.compile_ahead:  # the shape of a step must not depend on what is ready
            return
        self._add_loss([program], JOINED_SAVES * milliseconds)

    def settle(self, allowed_ms: float) -> None:
        """Compile in the background the programs whose absence cost time since the last call.

        A missing program costs time if a step ran in a slower program instead. The programs that
        cost the most come first. Stop when all others together cost at most `allowed_ms`.
        """
        lost, self._lost_ms = self._lost_ms, defaultdict(float)
        total = sum(lost.values())
        for needed in sorted(lost, key=lost.__getitem__, reverse=True):
            if total <= allowed_ms:
                return
            total -= lost[needed]
            self._programs.compile_behind(needed, is_urgent=False)

    def ready_for(self, all_demands: Iterable[Demands]) -> Ready:
        """Return the compiled shapes and split rounds for requests that have `all_demands`."""
        self._look()
        asked = self.asked_by(all_demands)
        if asked not in self._compiled:
            self._compiled[asked] = Ready(self._shapes(asked), self._splits(asked))
        return self._compiled[asked]

    def _shapes(self, asked: Variant) -> Shapes:
        covering, every = self._covering(asked), self.all_shapes
        best = self._programs_for_shapes(programs_of, covering[:1], every)
        if best and all(program in self._programs.ready for program in best):
            return every
        return Shapes(
            tuple(s for s in every.prefill if self._has(PrefillPlan((), *s), covering)),
            tuple(s for s in every.decode if self._has(DecodePlan((), *s, 0), covering)),
        )

    def _splits(self, asked: Variant) -> dict[SplitShape, SplitRound]:
        ready = [one for one in self._programs.ready if isinstance(one, SplitRound)]
        own = of_rounds(asked)
        return {one.shape: one for one in ready if covers(one.variant, own)}

    def _note_wish(self, wish: SplitWish, variant: Variant, milliseconds: float) -> None:
        """Record the time lost in a round, because the program of a faster split round is missing.

        `wish` describes the split round. The round that ran took `milliseconds`.
        """
        if self._config.compile_ahead or is_in_pieces(variant):  # see `note_apart`
            return
        self._add_loss([SplitRound(wish.shape, variant)], wish.gain * milliseconds)

    def _add_loss(self, needed: list[Program], milliseconds: float) -> None:
        """Add `milliseconds` to the time lost because the programs `needed` were not ready.

        Compile these programs when the lost time reaches `patience_ms`, or read them from disk when
        it reaches `READING_MS`.
        """
        programs, missing = self._programs, tuple(needed)
        if all(program in programs.ready for program in missing):
            return
        if missing not in self._on_disk:
            self._on_disk[missing] = programs.are_on_disk(missing)
        patience = self.patience_ms
        if self._on_disk[missing]:
            patience = min(patience, READING_MS)
        self._lost_ms[missing] += milliseconds
        if self._lost_ms[missing] >= patience:
            self._lost_ms[missing] = 0.0
            programs.compile_behind(missing, is_urgent=False)

    def _compile(self, variants: Iterable[Variant], shapes: Shapes, *, show_progress: bool) -> None:
        """Compile the programs of variants for the shapes `shapes.first`, and wait for them.

        Without the option `compile_ahead`, these are the programs of `first_programs_of`. With it,
        they are the programs of `programs_of`, and they are compiled for all shapes.
        """
        if not self._config.compile_ahead:
            first = self._programs_for_shapes(first_programs_of, variants, shapes.first)
            self._programs.compile_ahead(first, show_progress=show_progress)
            return
        first = self._programs_for_shapes(programs_of, variants, shapes.first)
        every = list(dict.fromkeys(self._programs_for_shapes(programs_of, variants, shapes)))
        self._programs.compile_ahead(first, then=every, show_progress=show_progress)
        self._programs.finish(show_progress=show_progress)
        if num_missing := sum(program not in self._programs.ready for program in every):
            warn(
                f"compile_ahead: {num_missing} of {len(every)} programs were not compiled, so that "
                'smaller steps run in larger shapes; the log "specjax" says why. If too many '
                "memory maps are in use, close other LLMs, or give fewer decode_batches or drafts"
            )

    def _ask(self, variant: Variant) -> None:
        """Compile the programs of a variant (a set of request options) in the background.

        The few programs that suffice to run steps come first, then programs that make steps fast.
        """
        first = self.all_shapes.first
        least = self._programs_for_shapes(first_programs_of, [variant], first)
        self._programs.compile_behind(least, is_urgent=True)
        best = self._programs_for_shapes(programs_of, [variant], first)
        self._programs.compile_behind(best, is_urgent=False)
        self.variants.append(variant)
        self._forget()

    def _programs_for_shapes(
        self, find: Callable[..., list[Program]], variants: Iterable[Variant], shapes: Shapes
    ) -> list[Program]:
        """Return the programs that `variants` need in `shapes`, the slowest to compile first.

        `find` is `programs_of` or `first_programs_of`.
        """
        by_drafts = sorted(shapes.decode, key=lambda shape: shape[::-1], reverse=True)
        plans = [
            *(DecodePlan((), *shape, 0) for shape in by_drafts),
            *(PrefillPlan((), *shape) for shape in sorted(shapes.prefill, reverse=True)),
        ]
        return [
            program
            for variant in variants
            for plan in plans
            for program in self._programs_for(find, plan, variant)
        ]

    def _programs_for(
        self, find: Callable[..., list[Program]], plan: Part, variant: Variant
    ) -> list[Program]:
        defers = self._programs.max_deferred(plan.batch) > 0
        return find(plan, variant, is_recurrent=self._is_recurrent, defers=defers)

    def _covering(self, asked: Variant) -> list[Variant]:
        """Return the known variants (sets of request options) that include all options of `asked`.

        Variants with masks come last if `asked` has no masks.
        """
        exactly = [variant for variant in self.variants if covers(variant, asked)]
        masked = asked._replace(masks=True)
        others = [variant for variant in self.variants if covers(variant, masked)]
        return exactly + [variant for variant in others if variant not in exactly]

    def _has(self, plan: Part, variants: Iterable[Variant]) -> bool:
        ready = self._programs.ready
        return any(
            all(program in ready for program in self._programs_for(find, plan, variant))
            for variant in variants
            for find in (programs_of, first_programs_of)
        )

    def _look(self) -> None:
        """Clear cached results if more programs are ready than at the last call; see `_forget`."""
        if len(self._programs.ready) != self._num_ready:
            self._num_ready = len(self._programs.ready)
            self._forget()

    def _forget(self) -> None:
        """Clear the caches of results that depend on the known variants and the ready programs."""
        self._chosen.clear()
        self._compiled.clear()
