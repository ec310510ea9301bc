"""A simulated device in NumPy, which plays a `Script` and checks everything that it reads.

It replaces `CompiledPrograms`: it takes the same packed arrays, and returns arrays of the same
form. It has no keys and values. Instead, a cell of a pool holds a digest of the tokens on which
they would depend: the tokens up to the cell's position for the target, and one token more for the
drafter. Before a chunk or round, all cells before its start are read through its page table. So
pages that are shared wrongly, outdated or overwritten are found. Methods without a docstring are
described in `Programs`.
"""

import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from typing import Any

import jax
import numpy as np
from support.scripts import EMPTY, HashScript, Script, fold
from support.simulated_outputs import Draft, Extension, HostArray, Outputs
from support.simulated_slots import Pools, Row, Slot, write

from specjax.config import EngineConfig
from specjax.device.drafters.drafter import Variant
from specjax.device.layout import Layout
from specjax.device.models.model import is_recurrent, page_windows
from specjax.engine.metrics import Compilations
from specjax.engine.programs import Decode, Prefill
from specjax.engine.tracing import Program
from specjax.host.speculation.step_cost import StepCost
from specjax.host.windows import window_pages

MAX_DEFERRED_ROWS = 7


class SimulatedPrograms:
    """`Programs` on a simulated device, to pass as an engine's `make_programs`.

    Args:
        script: determines tokens and drafts.
        tally: counts events.
        rng: fills memory that is undefined on a device.
    """

    def __init__(
        self,
        config: EngineConfig,
        target: Any,
        drafter: Any,
        verification: Any,
        params: Any,
        layout: Layout,
        max_drafts: int,
        *,
        placement: Any = None,
        script: Script | None = None,
        tally: Counter | None = None,
        rng: np.random.Generator | None = None,
    ):
        self.config, self.layout = config, layout
        self.script = script or HashScript(layout.vocab_size)
        self.tally = Counter() if tally is None else tally
        self.to_fail: list[str] = []  # programs that are to fail, once each
        # Slots that need a grammar's masks; None: masks are not checked.
        self.masked_slots: Callable[[], Collection[int]] | None = None
        self._reported = layout.vocab_size, config.logprobs_mode == "both"
        self._rng = rng or np.random.default_rng(0)
        self._num_snapshots = config.num_snapshots if is_recurrent(target) else None
        self._windows, self._max_drafts = page_windows(target, config), max_drafts
        self._max_deferred_rows = MAX_DEFERRED_ROWS if drafter.may_defer else 0
        self.ready: set[Program] = set()
        self.failures: dict[Program, Exception] = {}  # of those that do not compile
        self.pending: list[Program] = []  # programs being compiled; each wait completes one
        self.on_disk: set[Program] = set()
        self.is_slow = False  # whether programs are compiled in the background
        self.pace = 0.1  # probability that a launch completes one
        self._num_late = 0
        self._error: Exception | None = None  # of a program whose results have not been read yet
        self.params = params
        self._proposed: dict[int, dict] = {}  # rows of rounds between their programs, by K
        self._packings: dict[Program, list[Any]] = {}  # with shapes, of the packed arguments
        self.renew()

    num_processes, waits_at_conditionals = 1, False

    # --- the port ---------------------------------------------------------------------------------

    @property
    def params(self) -> Any:
        """The weights. Tokens depend on them."""
        return self._params

    @params.setter
    def params(self, params: Any) -> None:
        self._params, self._empty = params, EMPTY
        for leaf in jax.tree.leaves(params):
            self._empty = fold(self._empty, [zlib.crc32(np.asarray(leaf).tobytes())])

    @property
    def compilations(self) -> Compilations:
        return Compilations(len(self.ready), self._num_late, len(self.pending), 0.0)

    def are_on_disk(self, programs: Iterable[Program]) -> bool:
        return all(one in self.ready or one in self.on_disk for one in programs)

    @property
    def is_compiling(self) -> bool:
        return bool(self.pending)

    def max_deferred(self, batch: int) -> int:
        count = self._max_deferred_rows // batch
        return count if count > 1 else 0

    def compile_ahead(
        self, programs: Iterable[Program], *, then: Iterable[Program] = (), show_progress: bool
    ) -> None:
        self.ready |= set(programs)
        self.compile_behind(then, is_urgent=False)

    def compile_behind(self, programs: Iterable[Program], *, is_urgent: bool) -> None:
        missing = [one for one in programs if one not in self.ready and one not in self.failures]
        self._num_late += is_urgent * len(missing)
        if self.is_slow:
            first, last = (missing, self.pending) if is_urgent else (self.pending, missing)
            self.pending = list(dict.fromkeys([*first, *last]))
        else:
            self.ready |= set(missing)

    def finish(self, *, show_progress: bool) -> None:
        self.ready |= set(self.pending)
        self.pending = []

    def wait(self, seconds: float) -> None:
        if self.pending:
            self.ready.add(self.pending.pop(0))

    def run(self, program: Program, *arguments: Any) -> Any:
        name = type(program).__name__.lower()
        if name in self.to_fail:
            self.to_fail.remove(name)
            self.release()
            raise jax.errors.JaxRuntimeError(f"{name} was to fail")
        if self.pending and self._rng.random() < self.pace:
            self.wait(0.0)
        if program not in self.ready:
            self.ready.add(program)
            self._num_late += 1
        if program not in self._packings:
            self._packings[program] = [
                (self.layout.packing(kind), self.layout.packing(kind).shape(batch))
                for kind, batch in program.packed
            ]
        inputs = []
        for (packing, shape), packed in zip(self._packings[program], arguments, strict=False):
            assert packed.shape == shape and packed.dtype == np.int32
            inputs.append(packing.views(packed))
        return getattr(self, f"_{name}")(program, *inputs, *arguments[len(inputs) :])

    def wait_for(self, result: Any) -> None:
        """Return at once, because programs have results when they return."""

    def elsewhere(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Do nothing, because there is no other process."""

    def time_rounds(
        self, variant: Variant, ks: tuple[int, ...], batches: tuple[int, ...]
    ) -> StepCost:
        """Return made-up times: 1 for a round, and 0.1 for each of its rows."""
        self.renew()
        return StepCost({b: {k: 1 + 0.1 * b * (k + 1) for k in ks} for b in batches})

    def release(self) -> None:
        self.slots: list[Slot] = []

    def close(self) -> None:
        del self.slots

    def renew(self) -> None:
        """Empty all slots, and fill the pools with garbage."""
        self.slots = [Slot(number) for number in range(self.config.max_num_seqs)]
        sizes = {w: window_pages(self.config, w, self._max_drafts) for w in self._windows}
        self.pools = Pools(self.config, sizes, self._rng, self.tally)
        self.deferred: dict[int, tuple[int, int]] = {}  # by place: a cell, and its future digest
        self.snapshots = self.pools.garbage(self._num_snapshots or 0).tolist()
        self._error = None

    # --- programs, each by its name, with the inputs and results that `engine.programs` has -------

    def _admit(self, key, admitted):
        for row, slot in self._known(admitted.slots):
            requests = jax.tree.map(lambda x, row=row: x[row], admitted.requests)
            tokens = [token for token in admitted.tokens[row].tolist() if token >= 0]
            slot.digests = np.zeros(self.config.max_model_len + 64, np.int64)
            slot.digests[0] = self._empty
            slot.tokens = []
            for token in tokens:
                slot.append(token)
            sampling = requests.sampling
            slot.seed = int(sampling.seeds) if sampling.temperature else 0
            slot.prompt_length, slot.limit = int(requests.prompt_lengths), int(requests.limits)
            slot.min_tokens = int(requests.edits.min_tokens)
            slot.processor = int(requests.edits.processor)
            assert slot.prompt_length <= len(slot.tokens) < slot.limit <= self.config.max_model_len
            slot.stop_ids = frozenset(requests.stop_ids.tolist()) - {-1}
            slot.length, slot.is_active, slot.pending = None, False, 0

    def _restore(self, key, moves):
        for row, slot in self._known(moves.slots):
            slot.state, end = self.snapshots[moves.ids[row]], int(moves.ends[row])
            assert slot.state == slot.digests[end], f"the snapshot is not of these {end} tokens"
            self.tally["snapshots restored"] += 1

    def _take(self, key, moves):
        known = self._known(moves.slots)
        taken = [int(moves.ids[row]) for row, _ in known]
        assert len(set(taken)) == len(taken) and min(taken) >= 0, f"snapshots {taken}"
        for snapshot, (row, slot) in zip(taken, known, strict=True):
            assert not slot.pending and slot.state == slot.digests[moves.ends[row]]
            self.snapshots[snapshot] = slot.state
            self.tally["snapshots taken"] += 1

    def _prefill(self, key, chunks):
        known = self._known(chunks.slots)
        for row, slot in known:  # a step does not read what it writes
            self._check_chunk(slot, chunks, row, key.width)
            tables = self._tables(chunks.page_tables[row])
            self.pools.check_reads(slot, int(chunks.starts[row]), tables)
        for row, slot in known:
            start, count = int(chunks.starts[row]), int(chunks.counts[row])
            self._fold_pending(slot, start)
            slot.state = fold(slot.state, slot.tokens[start : start + count])
            values = slot.digests[start + 1 : start + count + 1]
            self.pools.write_target(self._tables(chunks.page_tables[row]), start, values, count)
            self.tally["prompt tokens run"] += count
        return Extension()

    def _begin(self, key, chunks, extension, logits, masks):
        extras = self._extras(chunks)
        outputs = Outputs(key.batch, 1, key.width, key.variant, *self._reported, extras=extras)
        for row, slot in self._known(chunks.slots):
            start, count = int(chunks.starts[row]), int(chunks.counts[row])
            is_last, is_resumed = chunks.is_last[row], chunks.is_resumed[row]
            table, end = self._tables(chunks.page_tables[row])[0], start + count
            if is_last and not is_resumed:
                self._check_mask(masks, row, 0, slot)
                assert slot.processor in {-1, *logits}, "unprocessed logits"
                slot.append(self._next(slot, []))
                outputs.put(row, end, [slot.tokens[end]], 0)
            following = slot.digests[start + 2 : end + 2].copy()
            if key.variant.num_prompt_logprobs is not None:
                outputs.put_prompt(row, start + 1, slot.tokens[start + 1 : end + 1])
            write(self.pools.drafter, self.pools.cells(table, start, end), following)
            slot.length = slot.observed = end
            is_finished = slot.tokens[-1] in slot.stop_ids or slot.limit - end <= 1
            slot.is_active = bool(is_last and (is_resumed or not is_finished))
        return self._out(outputs.packed)

    def _decode(self, key, round_):
        rows = self._rows(key.k, round_)
        self._extend_rows(key.k, rows)
        return self._out(self._settle_rows(key, rows, round_, frozenset(), None))

    def _observe(self, key, round_):
        width = self.max_deferred(key.batch)
        for number, slot in self._known(round_.slots):
            start, end = slot.observed, slot.length or 0
            if start == end:  # it ended before these rounds, or the state is a new one
                continue
            cells = self.pools.cells(self._tables(round_.page_tables[number])[0], start, end)
            places = range(number * width, number * width + len(cells))
            kept = [self.deferred.pop(place) for place in places]
            expected = zip(cells, slot.digests[start + 2 : end + 2], strict=True)
            assert kept == list(expected), "not what was left to be observed"
            write(self.pools.drafter, cells, slot.digests[start + 2 : end + 2])
            slot.observed = end
            self.tally["rounds observed later"] += len(cells)

    def _joined(self, key, chunks, round_):
        begin, decode = key.begin, key.decode
        rows = self._rows(decode.k, round_)
        for row in rows.values():  # neither may read what the other writes
            self.pools.check_reads(row.slot, row.start, row.tables)
        extension = self._prefill(Prefill(begin.batch, begin.width), chunks)
        self._extend_rows(decode.k, rows)
        outputs = self._settle_rows(decode, rows, round_, frozenset(), None, may_defer=False)
        self.tally["joined"] += 1
        begun = self._begin(begin, chunks, extension, frozenset(), None)
        return begun, self._out(outputs)

    def _splitround(self, key, drafting, others):
        k = key.shape.k
        parts = [(k, drafting, self._rows(k, drafting)), (0, others, self._rows(0, others))]
        for *_, rows in parts:  # neither may read what the other writes
            for row in rows.values():
                self.pools.check_reads(row.slot, row.start, row.tables)
        outputs = []
        for num_drafts, _, rows in parts:
            self._extend_rows(num_drafts, rows)
        for (num_drafts, round_, rows), batch in zip(parts, key.shape[::2], strict=True):
            whole = Decode(batch, num_drafts, key.variant)
            settled = self._settle_rows(whole, rows, round_, frozenset(), None, may_defer=False)
            outputs.append(self._out(settled))
        self.tally["split"] += 1
        return tuple(outputs)

    def _propose(self, key, round_):
        proposed = self._proposed[key.k] = self._rows(key.k, round_)
        drafts = np.zeros((key.batch, key.k), np.int32)
        for number, row in proposed.items():
            drafts[number] = row.drafts
        return Draft(HostArray(drafts))

    def _extend(self, key, round_, draft):
        self._extend_rows(key.k, self._proposed[key.k])
        return Extension()

    def _settle(self, key, round_, draft, extension, logits, masks):
        return self._out(self._settle_rows(key, self._proposed[key.k], round_, logits, masks))

    def _processfirst(self, key, inputs, logits):
        return logits | dict(key.processors).keys()

    def _processround(self, key, inputs, draft, logits):
        return logits | dict(key.processors).keys()

    # --- rounds -----------------------------------------------------------------------------------

    def _rows(self, k, round_):
        """Return the active rows of a round, with their drafts and accepted tokens."""
        rows = {}
        for number, slot in self._known(round_.slots):
            if not slot.is_active:
                continue
            start, tables = slot.length, self._tables(round_.page_tables[number])
            assert start is not None and len(slot.tokens) == start + 1
            most = max(min(slot.limit - start - 2, int(round_.num_drafts[number]), k), 0)
            drafts, num_drafts = self.script.draft(slot, self._next, k, most)
            if round_.suggestions is not None:
                path = round_.suggestions.tokens[number].tolist()
                known = slot.tokens[int(round_.suggestions.starts[number]) :]
                found = [token for token in path[len(known) :] if token >= 0][:k]
                if found and path[: len(known)] == known:
                    drafts = found + [0] * (k - len(found))
                    num_drafts = min(most, len(found))
                    self.tally["paths taken"] += 1
            tokens = [self._next(slot, [])]
            while len(tokens) <= num_drafts and drafts[len(tokens) - 1] == tokens[-1]:
                tokens.append(self._next(slot, tokens))
            rows[number] = Row(slot, start, tables, num_drafts, tokens, drafts)
        return rows

    def _extend_rows(self, k, rows):
        for row in rows.values():
            self.pools.check_reads(row.slot, row.start, row.tables, may_be_behind=not k)
        for row in rows.values():
            slot, start = row.slot, row.start
            self._fold_pending(slot, start)
            slot.ring = [slot.tokens[start], *row.drafts]
            for token in row.tokens:
                slot.append(token)
            values = self.pools.garbage(k + 1)
            stands = len(row.tokens)
            values[:stands] = slot.digests[start + 1 : start + 1 + stands]
            remaining = slot.limit - start - 1
            self.pools.write_target(row.tables, start, values, min(stands, remaining))

    def _settle_rows(self, key, rows, round_, logits, masks, *, may_defer=True):
        extras, width = self._extras(round_), self.max_deferred(key.batch)
        outputs = Outputs(key.batch, key.k + 1, 0, key.variant, *self._reported, extras=extras)
        for number, row in rows.items():
            slot, start, stands = row.slot, row.start, len(row.tokens)
            assert slot.processor in {-1, *logits}, "unprocessed logits"
            for place in range(stands):
                self._check_mask(masks, number, place, slot, start + 1 + place)
            cells = self.pools.cells(row.tables[0], start, start + key.k + 1)
            values = self.pools.garbage(key.k + 1)
            values[:stands] = slot.digests[start + 2 : start + 2 + stands]
            if may_defer and not key.k and width:
                assert start - slot.observed < width, "no room for what is to be observed later"
                place = number * width + start - slot.observed
                self.deferred[place] = int(cells[0]), int(values[0])
            else:
                write(self.pools.drafter, cells, values)
                slot.observed = start + stands
            remaining = slot.limit - start - 1
            tokens = row.tokens[:remaining]
            has_stop = [token in slot.stop_ids for token in tokens]
            if any(has_stop):
                tokens = tokens[: has_stop.index(True) + 1]
            assert cells[: len(tokens)].min() >= 0, f"no page for what stands from {start} on"
            outputs.put(number, start + 1, tokens, row.num_drafts)
            slot.length, slot.pending = start + stands, stands
            slot.is_active = not any(has_stop) and len(tokens) < remaining
            self.tally["rounds"] += 1
        return outputs.packed

    def _next(self, slot, more):
        """Return the token after the slot's tokens and `more`. The slot is not changed."""
        digest = fold(int(slot.digests[len(slot.tokens)]), more)
        tokens = [*slot.tokens, *more]
        token = self.script.following(tokens, digest, slot.seed)
        if len(tokens) - slot.prompt_length < slot.min_tokens:
            others = ((token + i) % self.layout.vocab_size for i in range(self.layout.vocab_size))
            token = next(other for other in others if other not in slot.stop_ids)
        return token

    # --- what it is given -------------------------------------------------------------------------

    def _tables(self, table):
        """Return the page tables of a row: the main table, and one for each window."""
        return table.reshape(self.layout.num_tables, -1)

    def _extras(self, inputs):
        """Return the `Extras` of all requests of a step together."""
        extras = inputs.extras
        assert (extras == extras[0]).all()
        return int(extras[0])

    def _known(self, slots):
        """Return pairs (row, slot) of all rows that are not padding."""
        real = [(row, int(slot)) for row, slot in enumerate(slots) if slot != len(self.slots)]
        assert all(0 <= slot < len(self.slots) for _, slot in real), f"slots {slots}"
        assert len({slot for _, slot in real}) == len(real), f"a slot is twice in {slots}"
        assert [row for row, _ in real] == list(range(len(real))), f"padding first in {slots}"
        return [(row, self.slots[slot]) for row, slot in real]

    def _fold_pending(self, slot, start):
        if self._num_snapshots is None:
            return
        slot.state = fold(slot.state, slot.ring[: slot.pending])
        slot.pending = 0
        if start == 0:
            slot.state = self._empty
        assert slot.state == slot.digests[start], f"the state is not of the first {start} tokens"

    def _check_chunk(self, slot, chunks, row, width):
        start, count = int(chunks.starts[row]), int(chunks.counts[row])
        is_last, is_resumed = int(chunks.is_last[row]), int(chunks.is_resumed[row])
        assert 0 < count <= width
        assert slot.length in (None, start) and not slot.is_active, "chunks in disorder"
        goal = len(slot.tokens) - is_resumed
        assert start + count <= goal and is_last == (start + count == goal)
        assert is_resumed == (len(slot.tokens) > slot.prompt_length)

    def _check_mask(self, masks, row, place, slot, length=None):
        """Check that the grammar's mask is the mask after the first `length` tokens."""
        if self.masked_slots is None:
            return
        if slot.number not in self.masked_slots():
            assert masks is None or (masks[row] == -1).all()
            return
        assert masks is not None, "a grammar without masks"
        known = slot.tokens[slot.prompt_length : length]
        assert masks[row, place, 0] == self.script.mask(known), "the mask is of other tokens"
        self.tally["masks"] += 1

    def _out(self, packed):
        if "read" in self.to_fail:
            self.to_fail.remove("read")
            self._error = jax.errors.JaxRuntimeError("reading was to fail")
        return HostArray(packed, self._error)  # all results after a failure fail, too
