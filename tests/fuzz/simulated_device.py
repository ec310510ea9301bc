"""A device that plays a script and checks all that it reads.

It takes the packed arrays that the programs of a step take, and gives what they give. In place of
keys and values, a cell of its pool holds the digest of the tokens that they would depend on: up to
its position for the target, and one further for the drafter. A round, or a chunk, looks at every
cell below its start through its own page table, so that a page that is shared wrongly, stale, or
overwritten is found when it is read. The token that follows a history, and how many drafts of a
round stand, hang on nothing but the history and the seed of the request.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import numpy as np

from specjax.batch import Layout, Part
from specjax.config import EngineConfig
from specjax.device.drafters.drafter import Variant
from specjax.host.scheduler import DecodePlan

EMPTY = 1  # the digest of no tokens
NEXT, ACCEPTED, DRAFTED, MASK = range(4)  # what is drawn from a digest


def fold(digest: int, tokens: Sequence[int]) -> int:
    """The digest of a history that goes on with `tokens`."""
    for token in tokens:
        digest = hash((digest, token))
    return digest


def draw(digest: int, seed: int, what: int, bound: int) -> int:
    """A number below `bound` that hangs on a history and a seed."""
    return (hash((digest, seed, what)) >> 24) % bound


def next_token(digest: int, seed: int, vocab_size: int) -> int:
    """The token that follows a history."""
    return draw(digest, seed, NEXT, vocab_size)


def mask_of(digest: int) -> int:
    """What stands for the grammar's mask after a history: a word that no other history has."""
    return draw(digest, 0, MASK, 2**30)


class Draft(NamedTuple):
    """What a round proposes, as `specjax.device.verification.Draft` has it."""

    tokens: Any  # i32[B, K]


class HostArray(np.ndarray):
    """An array that looks as if it came from the device; reading it may fail."""

    error: Exception | None = None

    @classmethod
    def of(cls, array: np.ndarray, error: Exception | None = None) -> "HostArray":
        """`array`, or the error that reading it meets."""
        made = array.view(cls)
        made.error = error
        return made

    def copy_to_host_async(self) -> None:
        """Nothing is to be done."""

    def is_ready(self) -> bool:
        """Not until it is read."""
        return False

    def __array__(self, *arguments: Any, **options: Any) -> np.ndarray:
        if self.error is not None:
            raise self.error
        return self.view(np.ndarray)


@dataclass
class Slot:
    """What the device knows of the request in a slot."""

    tokens: list[int] = field(default_factory=list)
    digests: Any = None  # i64[...], of the first n tokens
    seed: int = 0
    prompt_length: int = 0
    limit: int = 0
    stop_ids: frozenset[int] = frozenset()
    length: int | None = None  # None before the first chunk
    is_active: bool = False
    # Of recurrent models:
    state: int = EMPTY  # the digest of the tokens that have been folded in
    ring: list[int] = field(default_factory=list)  # tokens of the last round
    pending: int = 0  # of those, how many stand and are still to be folded in

    def append(self, token: int) -> None:
        """Know one token more."""
        self.tokens.append(token)
        self.digests[len(self.tokens)] = fold(int(self.digests[len(self.tokens) - 1]), [token])


@dataclass(frozen=True)
class Row:
    """A row of a decode program between its parts."""

    slot: Slot
    start: int
    table: np.ndarray
    num_drafts: int
    tokens: list[int]  # that stand: accepted drafts, and the one after them
    drafts: list[int]


@dataclass
class SimulatedDevice:
    """The state of an engine, and its programs, which change it in place."""

    config: EngineConfig
    layout: Layout
    num_snapshots: int | None  # None for a model without recurrent layers
    drafts_fewer: bool  # whether a round may propose fewer drafts than asked
    tally: Counter
    rng: np.random.Generator
    failures: list[str] = field(default_factory=list)  # programs that are to fail, once each
    error: Exception | None = None  # of a program whose results have not been read yet

    def __post_init__(self):
        num_cells = self.config.num_pages * self.config.page_size
        self.slots = [Slot() for _ in range(self.config.max_num_seqs)]
        self.target, self.drafter = self._garbage(num_cells), self._garbage(num_cells)
        self.snapshots = self._garbage(self.num_snapshots or 0).tolist()

    def delete(self) -> None:
        """Free the memory; nothing can be run afterwards."""
        self.slots = []

    def program(self, name: str, plan: Part, variant: Variant) -> Any:
        """A program of a step, as `Executables.get` has it."""
        if name in self.failures:
            self.failures.remove(name)
            self.delete()
            raise jax.errors.JaxRuntimeError(f"{name} was to fail")
        run = getattr(self, f"_{name}")
        if name in ("admit", "restore", "take"):
            return lambda _, packed: run(packed)
        return lambda _params, _state, *arguments: (self, run(plan, variant, *arguments))

    def _garbage(self, count: int) -> np.ndarray:
        return self.rng.integers(-(2**62), 2**62, count)

    def _known(self, slots: np.ndarray) -> list[tuple[int, Slot]]:
        """The rows that are no padding, with their slots."""
        real = [(row, int(slot)) for row, slot in enumerate(slots) if slot != len(self.slots)]
        assert all(0 <= slot < len(self.slots) for _, slot in real), f"slots {slots}"
        assert len({slot for _, slot in real}) == len(real), f"a slot is twice in {slots}"
        assert [row for row, _ in real] == list(range(len(real))), f"padding first in {slots}"
        return [(row, self.slots[slot]) for row, slot in real]

    def _cells(self, table: np.ndarray, start: int, end: int) -> np.ndarray:
        """The cells of positions [start, end); -1 where no page is assigned."""
        size = self.config.page_size
        positions = np.arange(start, end)
        places = positions // size
        pages = np.where(places < len(table), table[np.minimum(places, len(table) - 1)], -1)
        assert (pages < self.config.num_pages).all(), f"no such page in {table}"
        return np.where(pages >= 0, pages * size + positions % size, -1)

    def _check_reads(self, slot: Slot, start: int, table: np.ndarray) -> None:
        cells = self._cells(table, 0, start)
        if not len(cells):
            return
        assert cells.min() >= 0, f"position {cells.argmin()} of {start} has no page"
        for name, pool, ahead in ("target", self.target, 1), ("drafter", self.drafter, 2):
            is_wrong = pool[cells] != slot.digests[ahead : start + ahead]
            if is_wrong.any():
                place = int(is_wrong.argmax())
                raise AssertionError(
                    f"position {place} of {start} is not what the {name} left there: page "
                    f"{cells[place] // self.config.page_size}, {int(is_wrong.sum())} wrong"
                )
        self.tally["cells read"] += len(cells)

    def _write(self, pool: np.ndarray, cells: np.ndarray, values: np.ndarray) -> None:
        is_mapped = cells >= 0
        pool[cells[is_mapped]] = values[is_mapped]

    def _fold_pending(self, slot: Slot, start: int) -> None:
        if self.num_snapshots is None:
            return
        slot.state = fold(slot.state, slot.ring[: slot.pending])
        slot.pending = 0
        if start == 0:
            slot.state = EMPTY
        assert slot.state == slot.digests[start], f"the state is not of the first {start} tokens"

    def _admit(self, packed: np.ndarray) -> "SimulatedDevice":
        starts, start = {}, 0
        for name, (width, _) in self.layout.admit_fields.items():
            starts[name] = slice(start, start + width)
            start += width
        for row, slot in self._known(packed[:, 0]):
            fields = {name: packed[row, place].tolist() for name, place in starts.items()}
            tokens = fields["tokens"]
            tokens = tokens[: tokens.index(-1)] if -1 in tokens else tokens
            slot.digests = np.zeros(self.config.max_model_len + 64, np.int64)
            slot.digests[0] = EMPTY
            slot.tokens = []
            for token in tokens:
                slot.append(token)
            slot.seed = fields["seed"][0] % 2**32
            slot.prompt_length, slot.limit = fields["prompt_length"][0], fields["limit"][0]
            assert slot.prompt_length <= len(slot.tokens) < slot.limit <= self.config.max_model_len
            slot.stop_ids = frozenset(fields["stop_ids"]) - {-1}
            slot.length, slot.is_active, slot.pending = None, False, 0
        return self

    def _restore(self, packed: np.ndarray) -> "SimulatedDevice":
        for row, slot in self._known(packed[:, 0]):
            _, snapshot, end = packed[row].tolist()
            slot.state = self.snapshots[snapshot]
            assert slot.state == slot.digests[end], f"snapshot {snapshot} is not of these {end}"
            self.tally["snapshots restored"] += 1
        return self

    def _take(self, packed: np.ndarray) -> "SimulatedDevice":
        taken = [packed[row, 1] for row, _ in self._known(packed[:, 0])]
        assert len(set(taken)) == len(taken), f"a snapshot is twice in {taken}"
        for row, slot in self._known(packed[:, 0]):
            _, snapshot, end = packed[row].tolist()
            assert not slot.pending and slot.state == slot.digests[end]
            assert 0 <= snapshot < len(self.snapshots)
            self.snapshots[snapshot] = slot.state
            self.tally["snapshots taken"] += 1
        return self

    def _prefill(self, plan: Part, variant: Variant, packed: np.ndarray) -> None:
        known = self._known(packed[:, 0])
        for row, slot in known:  # what a step writes is there for later ones only
            self._check_chunk(slot, packed[row].tolist(), plan.width)
            self._check_reads(slot, packed[row, 1], packed[row, -self.layout.pages_per_seq :])
        for row, slot in known:
            _, start, count, *_ = packed[row].tolist()
            self._fold_pending(slot, start)
            slot.state = fold(slot.state, slot.tokens[start : start + count])
            cells = self._cells(packed[row, -self.layout.pages_per_seq :], start, start + count)
            assert cells.min() >= 0, "a chunk without pages"
            self._write(self.target, cells, slot.digests[start + 1 : start + count + 1])
            self.tally["prompt tokens run"] += count

    def _check_chunk(self, slot: Slot, packed: list[int], width: int) -> None:
        _, start, count, is_last, is_resumed, *_ = packed
        assert 0 < count <= width
        assert slot.length in (None, start) and not slot.is_active, "chunks in disorder"
        goal = len(slot.tokens) - is_resumed
        assert start + count <= goal and is_last == (start + count == goal)
        assert is_resumed == (len(slot.tokens) > slot.prompt_length)

    def _begin(
        self,
        plan: Part,
        variant: Variant,
        packed: np.ndarray,
        extension: None,
        masks: np.ndarray | None,
    ) -> HostArray:
        outputs = _Outputs(plan, variant, 1)
        for row, slot in self._known(packed[:, 0]):
            _, start, count, is_last, is_resumed, *_ = packed[row].tolist()
            table, end = packed[row, -self.layout.pages_per_seq :], start + count
            if is_last and not is_resumed:
                self._check_mask(plan, masks, row, 0, slot)
                slot.append(self._next(slot))
                outputs.put(row, slot, end, [slot.tokens[end]], 0)
            following = slot.digests[start + 2 : end + 2].copy()
            if variant.num_prompt_logprobs is not None:
                outputs.put_prompt(row, slot, start, count)
            self._write(self.drafter, self._cells(table, start, end), following)
            slot.length = end
            is_finished = slot.tokens[-1] in slot.stop_ids or slot.limit - end <= 1
            slot.is_active = bool(is_last and (is_resumed or not is_finished))
        return self._out(outputs.packed)

    def _decode(self, plan: Part, variant: Variant, packed: np.ndarray) -> HostArray:
        assert isinstance(plan, DecodePlan)
        num_scalars = packed.shape[1] - self.layout.pages_per_seq
        assert num_scalars == 3 and (packed[:, 2] == plan.num_rounds).all()
        width = _Outputs(plan, variant, plan.k + 1).packed.shape[1]
        rounds = np.zeros((self.config.steps_per_dispatch, plan.batch, width), np.int32)
        for number in range(int(packed[0, 2])):
            if not any(slot.is_active for _, slot in self._known(packed[:, 0])):
                break
            rows = self._rows(plan, packed)
            self._extend_rows(plan, rows)
            rounds[number] = self._settle_rows(plan, variant, rows, None)
        return self._out(rounds)

    def _propose(self, plan: Part, variant: Variant, packed: np.ndarray) -> Draft:
        self._proposed = self._rows(plan, packed)
        drafts = np.zeros((plan.batch, plan.k), np.int32)
        for number, row in self._proposed.items():
            drafts[number] = row.drafts
        return Draft(drafts.view(HostArray))

    def _extend(self, plan: Part, variant: Variant, packed: np.ndarray, draft: Draft) -> None:
        self._extend_rows(plan, self._proposed)

    def _settle(
        self,
        plan: Part,
        variant: Variant,
        packed: np.ndarray,
        draft: Draft,
        extension: None,
        masks: np.ndarray,
    ) -> HostArray:
        assert plan.num_rounds == 1, "rounds that wait for masks run one at a time"
        return self._out(self._settle_rows(plan, variant, self._proposed, masks)[None])

    def _rows(self, plan: Part, packed: np.ndarray) -> dict[int, Row]:
        """Every row of a round that goes on, with its drafts and what will come of them."""
        rows = {}
        for number, slot in self._known(packed[:, 0]):
            if not slot.is_active:
                continue
            start, table = slot.length, packed[number, -self.layout.pages_per_seq :]
            assert start is not None and len(slot.tokens) == start + 1
            digest, truth = int(slot.digests[start + 1]), []
            num_drafts = min(slot.limit - start - 2, int(packed[number, 1]), plan.k)
            if self.drafts_fewer:
                num_drafts = min(num_drafts, draw(digest, slot.seed, DRAFTED, plan.k + 1))
            accepted = min(num_drafts, draw(digest, slot.seed, ACCEPTED, plan.k + 1))
            for _ in range(plan.k + 1):
                truth.append(next_token(digest, slot.seed, self.layout.vocab_size))
                digest = fold(digest, truth[-1:])
            drafts = truth[:accepted]
            # Wrong where they part from the truth; then anything.
            drafts += [(token + 1) % self.layout.vocab_size for token in truth[accepted:-1]]
            rows[number] = Row(slot, start, table, num_drafts, truth[: accepted + 1], drafts)
        return rows

    def _extend_rows(self, plan: Part, rows: dict[int, Row]) -> None:
        for row in rows.values():
            self._check_reads(row.slot, row.start, row.table)
        for row in rows.values():
            slot, start = row.slot, row.start
            self._fold_pending(slot, start)
            slot.ring = [slot.tokens[start], *row.drafts]
            for token in row.tokens:
                slot.append(token)
            values = self._garbage(plan.k + 1)
            stands = len(row.tokens)
            values[:stands] = slot.digests[start + 1 : start + 1 + stands]
            cells = self._cells(row.table, start, start + plan.k + 1)
            self._write(self.target, cells, values)

    def _settle_rows(
        self, plan: Part, variant: Variant, rows: dict[int, Row], masks: np.ndarray | None
    ) -> np.ndarray:
        outputs = _Outputs(plan, variant, plan.k + 1)
        for number, row in rows.items():
            slot, start, stands = row.slot, row.start, len(row.tokens)
            for place in range(stands):
                self._check_mask(plan, masks, number, place, slot, start + 1 + place)
            cells = self._cells(row.table, start, start + plan.k + 1)
            values = self._garbage(plan.k + 1)
            values[:stands] = slot.digests[start + 2 : start + 2 + stands]
            self._write(self.drafter, cells, values)
            remaining = slot.limit - start - 1
            tokens = row.tokens[:remaining]
            has_stop = [token in slot.stop_ids for token in tokens]
            if any(has_stop):
                tokens = tokens[: has_stop.index(True) + 1]
            assert cells[: len(tokens)].min() >= 0, f"no page for what stands from {start} on"
            outputs.put(number, slot, start + 1, tokens, row.num_drafts)
            slot.length, slot.pending = start + stands, stands
            slot.is_active = not any(has_stop) and len(tokens) < remaining
            self.tally["rounds"] += 1
        return outputs.packed

    def _next(self, slot: Slot) -> int:
        digest = int(slot.digests[len(slot.tokens)])
        return next_token(digest, slot.seed, self.layout.vocab_size)

    def _check_mask(
        self,
        plan: Part,
        masks: np.ndarray | None,
        row: int,
        place: int,
        slot: Slot,
        length: int | None = None,
    ) -> None:
        """The grammar's mask must be that after the first `length` tokens."""
        sequence = plan.sequences[row]
        has_none = sequence.matcher is None or sequence.error is not None
        if has_none or sequence.is_finished:
            assert masks is None or (masks[row] == -1).all()
            return
        assert masks is not None, "a grammar without masks"
        known = slot.tokens[slot.prompt_length : length]
        assert masks[row, place, 0] == mask_of(fold(EMPTY, known)), "the mask is of other tokens"
        self.tally["masks"] += 1

    def _out(self, packed: np.ndarray) -> HostArray:
        if "read" in self.failures:
            self.failures.remove("read")
            self.error = jax.errors.JaxRuntimeError("reading was to fail")
        return HostArray.of(packed, self.error)  # what comes after a failure fails as well


class _Outputs:
    """What a program gives, as `pack_outputs` has it; log-probabilities tell where they are of."""

    def __init__(self, plan: Part, variant: Variant, num_rows: int):
        self._num_rows = num_rows
        self._has_logprobs = variant.num_logprobs is not None
        width = 2 + num_rows * (3 if self._has_logprobs else 1)
        self._prompt = width
        if not isinstance(plan, DecodePlan) and variant.num_prompt_logprobs is not None:
            width += 2 * plan.width
            self._prompt_width = plan.width
        self.packed = np.zeros((plan.batch, width), np.int32)

    def put(self, row: int, slot: Slot, start: int, tokens: list[int], num_drafts: int) -> None:
        count, num_rows = len(tokens), self._num_rows
        self.packed[row, :2] = count, num_drafts
        self.packed[row, 2 : 2 + count] = tokens
        if self._has_logprobs:
            self._put(row, 2 + num_rows, 2 + 2 * num_rows, start, tokens)

    def put_prompt(self, row: int, slot: Slot, start: int, count: int) -> None:
        following = slot.tokens[start + 1 : start + 1 + count]
        self._put(row, self._prompt, self._prompt + self._prompt_width, start + 1, following)

    def _put(self, row: int, values: int, ranks: int, start: int, tokens: list[int]) -> None:
        count = len(tokens)
        places = -np.arange(start, start + count, dtype=np.float32)
        self.packed[row, values : values + count] = places.view(np.int32)
        self.packed[row, ranks : ranks + count] = tokens
