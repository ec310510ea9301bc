"""Measures the times of rounds.

`measure_rounds` times rounds of every shape, with artificial requests. All shapes must be compiled,
and the engine must have no requests. The artificial requests have random tokens and a given length
of context. They share pages if the pool has too few pages. `time_padding` times rounds of padding
rows, which is possible at any time.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from statistics import median
from typing import Any, Protocol

import jax
import numpy as np

from specjax.device.drafters.drafter import Variant
from specjax.device.inputs import DecodeInputs
from specjax.device.layout import Layout
from specjax.device.placement import own_part, put
from specjax.device.state import EngineState
from specjax.engine.batch import Part
from specjax.engine.in_flight import Extended, InFlight
from specjax.engine.programs import Decode
from specjax.engine.tracing import Program
from specjax.host.plans import DecodePlan
from specjax.host.speculation.step_cost import StepCost

TIMED_RUNS = 5  # number of timed rounds of padding rows
MIN_PASSES, MAX_PASSES, ENOUGH_SECONDS = 3, 9, 5.0
MIN_MS = 1e-3  # replaces a time of 0 or less, if a round ends before the previous one was read

Point = tuple[int, int, int]  # batch size, K, tokens of context
Launch = Callable[[list[Part]], list[InFlight | Extended]]


class TimedPrograms(Protocol):
    """Runs programs for `measure_rounds`, with an artificial request in each row of the state."""

    def fill(self) -> None:
        """Replace the state with `filled(state)`, in which each row has an artificial request."""
        ...

    def set_context(self, length: int) -> None:
        """Give each artificial request `length` tokens of context (see `progress_at`)."""
        ...

    def run(self, program: Program, *arguments: Any) -> Any: ...


def measure_rounds(
    programs: TimedPrograms,
    variant: Variant,
    layout: Layout,
    num_pages: Sequence[int],
    ks: tuple[int, ...],
    batches: tuple[int, ...],
) -> StepCost:
    """Measure times of rounds by batch size, K and context, with artificial requests.

    The artificial requests remain in the state.

    Each of several passes times every shape once, and the time of a shape is the median over
    passes. So a short disturbance affects few of the measurements of a shape. The time that a
    context token adds is assumed to be linear in K. This time is measured at the largest batch
    size, for the smallest and the largest K, with two lengths of context. If `max_model_len` is too
    short for two lengths, the time per context token is 0.

    Rounds run as in serving: each round is launched before the previous round is read. Host time
    counts only while the device waits for the host, as in `RoundClock.time`. `num_pages` holds the
    number of pages in each pool.
    """
    room = (MAX_PASSES + 1) * (max(ks) + 1)
    short, long = layout.max_model_len // 8, layout.max_model_len - room
    programs.fill()

    def launch(point: Point) -> InFlight:
        start, (batch, k, context) = time.perf_counter(), point
        packed = pack_round(batch, k, layout, num_pages)
        programs.set_context(context)
        outputs = programs.run(Decode(batch, k, variant), packed)
        outputs.copy_to_host_async()
        launched = InFlight(DecodePlan((), batch, k, k), variant, outputs, start, start)
        launched.look()
        return launched

    def run_all(points: Sequence[Point]) -> Iterator[tuple[Point, float]]:
        """Run a round for each point (batch size, K, context).

        Yield the point and its milliseconds.

        A round before the first point and a round after the last point are not timed.
        """
        before, end = launch(points[-1]), 0.0
        for i, point in enumerate([*points, points[0]]):
            before.look()
            launched = launch(point)
            np.asarray(before.outputs)
            done = time.perf_counter() if before.done is None else before.done
            if i:
                yield points[i - 1], max(1e3 * (done - max(end, before.start)), MIN_MS)
            before, end = launched, done

    max_batch, ends = batches[-1], sorted({min(ks), max(ks)})
    points = [(batch, k, short) for batch in batches for k in ks]
    points += [(max_batch, k, long) for k in ends if long > 2 * short]
    list(run_all(points))  # not counted: the first run touches new memory
    times: dict[Point, list[float]] = {point: [] for point in points}
    start = time.perf_counter()
    for i in range(MAX_PASSES):
        for point, milliseconds in run_all(points):
            times[point].append(milliseconds)
        if i + 1 >= MIN_PASSES and time.perf_counter() - start > ENOUGH_SECONDS:
            break
    middle = {point: median(found) for point, found in times.items()}
    per_token = per_draft = 0.0
    if long > 2 * short:
        num_tokens = max_batch * (long - short)
        added = {k: middle[max_batch, k, long] - middle[max_batch, k, short] for k in ends}
        least, most = ends[0], ends[-1]
        if most > least:
            per_draft = max(0.0, (added[most] - added[least]) / (num_tokens * (most - least)))
        per_token = max(0.0, min(added.values()) / num_tokens - least * per_draft)
    by_batch = {batch: {k: middle[batch, k, short] for k in ks} for batch in batches}
    return StepCost(
        _without_context(by_batch, short, per_token, per_draft),
        batches=batches,
        ms_per_context_token=per_token,
        ms_per_context_draft=per_draft,
    )


def _without_context(
    points: Mapping[int, Mapping[int, float]], context: int, per_token: float, per_draft: float
) -> dict[int, dict[int, float]]:
    """Return the times that rounds would take without context.

    `points` holds milliseconds by batch size and K, for `context` context tokens per request. Each
    context token has added `per_token` + K * `per_draft` milliseconds. The result is at least a
    tenth of the measured time.
    """
    return {
        batch: {
            k: max(ms - batch * context * (per_token + k * per_draft), 0.1 * ms)
            for k, ms in column.items()
        }
        for batch, column in points.items()
    }


def filled(state: EngineState, vocab_size: int) -> EngineState:
    """Return a state in which each row has a request of random tokens that never ends."""
    tokens = np.random.default_rng(0).integers(0, vocab_size, state.tokens.shape[-2:])
    return replace(
        state,
        tokens=_like(state.tokens, tokens),
        progress=progress_at(state, 0),
        requests=replace(state.requests, limits=_like(state.requests.limits, 2**30)),
    )


def progress_at(state: EngineState, length: int) -> jax.Array:
    """Return `EngineState.progress` for requests that are all active and have `length` tokens."""
    return _like(state.progress, [length, 0, 1, length])


def _like(x: jax.Array, values: Any) -> jax.Array:
    """Return an array with the shape, dtype and sharding of `x`, filled with `values`.

    `values` are broadcast to the shape.
    """
    # Divided states have the same values on every device.
    return put(np.full(own_part(x).shape, values, x.dtype), x.sharding)


def time_padding(launch: Launch, batch: int, k: int) -> float:
    """Measure the milliseconds of a round of padding rows, which leaves the state unchanged.

    As in serving, each round is launched before the host waits for the previous round.
    """
    plan, ends = DecodePlan((), batch, k, k), []

    def wait_for(step: InFlight | Extended) -> None:
        if isinstance(step, InFlight):
            np.asarray(step.outputs)
        ends.append(time.perf_counter())

    (before,) = launch([plan])  # its end time includes earlier launches
    for _ in range(TIMED_RUNS):
        (launched,) = launch([plan])
        wait_for(before)
        before = launched
    wait_for(before)
    return 1e3 * median(b - a for a, b in pairwise(ends))


def pack_round(batch: int, k: int, layout: Layout, num_pages: Sequence[int]) -> np.ndarray:
    """Return the packed inputs of a round whose times are measured; see `batch.pack`.

    The round has `batch` artificial requests, in the first rows of the state and on consecutive
    pages. `num_pages` holds the number of pages in each pool.
    """
    packed, rows = layout.packing(DecodeInputs).rows(batch)
    rows.slots[:], rows.num_drafts[:] = np.arange(batch), k
    table = np.arange(batch * layout.pages_per_seq).reshape(batch, -1)
    rows.page_tables[:] = np.hstack([table % count for count in num_pages])
    return packed
