"""Computes summary figures of runs, and shows them as a table and as sentences."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from rich.table import Table

from specjax.bench.measure import PLAIN, Configuration, Run
from specjax.bench.repetition import count_repeated, repeated_share
from specjax.bench.sources import DraftsBySource

LOW_REPEAT = 0.1
# Milliseconds per step by K of Llama-3.1-8B with EAGLE-1 at batch size 1 on an H100, measured at
# commit 04df7ee: benchmarks/results/gpu.jsonl and README.md.
H100_MS = {0: 5.86, 1: 6.40, 3: 7.49, 5: 8.59}


@dataclass(frozen=True)
class Spread:
    """The median over rounds, and the tenth and ninetieth percentiles."""

    median: float
    p10: float
    p90: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        """Return the spread of `values`, which must not be empty."""
        p10, median, p90 = np.percentile(values, [10, 50, 90]).tolist()
        return cls(median, p10, p90)


@dataclass(frozen=True, kw_only=True)
class RoundFigures:
    """The figures of one round: one batch of prompts under one configuration.

    Attributes:
        prompts: indices of the prompts in the batch.
    """

    prompts: tuple[int, ...]
    tokens_per_second: float
    plain_tokens_per_second: float
    times_plain: float
    ms_per_step: float
    mean_acceptance_length: float

    @classmethod
    def of(cls, run: Run, plain: Run) -> "RoundFigures":
        """Return the figures of `run`, compared with plain decoding in the same round."""
        return cls(
            prompts=tuple(sorted(run.outputs)),  # pyright: ignore[reportArgumentType]
            tokens_per_second=run.tokens_per_second,
            plain_tokens_per_second=plain.tokens_per_second,
            times_plain=run.tokens_per_second / plain.tokens_per_second,
            ms_per_step=run.ms_per_step,
            mean_acceptance_length=run.num_tokens / run.num_request_steps,
        )


@dataclass(frozen=True, kw_only=True)
class Figures:
    """The results of one configuration, without prefill. Rates are ratios of totals over rounds.

    Attributes:
        num_tokens: number of output tokens in all rounds, except the first token of each output.
        tokens_per_second: tokens per second of the whole batch.
        plain_tokens_per_second: tokens per second of plain decoding in the same rounds.
        times_plain: `tokens_per_second` divided by `plain_tokens_per_second`.
        plain_steps: `ms_per_step` divided by the milliseconds per step of plain decoding in the
            same rounds.
        ms_per_token: `Run.ms_per_token` (TPOT), as a spread over rounds.
        mean_acceptance_length: mean number of tokens that a request gains in a step.
        acceptance_per_position: for each position of a draft, the fraction of requests' steps that
            accepted the draft.
        ratio: tokens per second divided by plain decoding's tokens per second, as a spread over
            rounds.
        num_differing: number of prompts whose output tokens differ from plain decoding's.
        repeated_8gram_share: fraction of 8-grams that occurred earlier in the same output.
        num_low_repeat: number of outputs whose fraction of repeated 8-grams is below LOW_REPEAT.
        mean_acceptance_length_low_repeat: mean acceptance length of the outputs that
            `num_low_repeat` counts; None if there are none, or if the batch size is above 1.
        rounds: the figures of each round, in order.
        by_source: counts and acceptance of each source of drafts; empty if the drafter makes all
            drafts.
    """

    configuration: str
    method: str
    k: int
    num_outputs: int
    num_tokens: int
    num_steps: int
    seconds: float
    tokens_per_second: float
    plain_tokens_per_second: float
    times_plain: float
    ms_per_step: float
    plain_steps: float
    ms_per_token: Spread
    mean_acceptance_length: float
    acceptance_per_position: tuple[float, ...]
    ratio: Spread
    num_differing: int
    repeated_8gram_share: float
    num_low_repeat: int
    mean_acceptance_length_low_repeat: float | None
    rounds: tuple[RoundFigures, ...] = ()
    by_source: Mapping[str, Any] = field(default_factory=dict)


def summarise(
    configuration: Configuration, runs: Sequence[Run], baseline: Sequence[Run]
) -> Figures:
    """Return the figures of `runs`, compared with plain decoding in the same rounds."""
    pairs = [
        (run, base)
        for run, base in zip(runs, baseline, strict=True)
        if run.num_tokens and base.num_tokens
    ]
    if not pairs:
        raise ValueError("no output reached a second token, so there is nothing to time")
    own, plain = (_Totals.of(side) for side in zip(*pairs, strict=True))
    accepted = np.zeros(configuration.k)
    for run, _ in pairs:
        counts = run.num_accepted_per_pos[: configuration.k]
        accepted[: len(counts)] += counts
    outputs = {key: tokens for run in runs for key, tokens in run.outputs.items()}
    repeated, total = np.sum([count_repeated(tokens) for tokens in outputs.values()], axis=0)
    return Figures(
        configuration=configuration.name,
        method=configuration.method,
        k=configuration.k,
        num_outputs=len(outputs),
        num_tokens=own.tokens,
        num_steps=own.steps,
        seconds=own.seconds,
        tokens_per_second=own.tokens_per_second,
        plain_tokens_per_second=plain.tokens_per_second,
        times_plain=own.tokens_per_second / plain.tokens_per_second,
        ms_per_step=own.ms_per_step,
        plain_steps=own.ms_per_step / plain.ms_per_step,
        ms_per_token=Spread.of([run.ms_per_token for run, _ in pairs]),
        mean_acceptance_length=own.tokens / own.request_steps,
        acceptance_per_position=tuple((accepted / own.request_steps).tolist()),
        ratio=Spread.of([run.tokens_per_second / base.tokens_per_second for run, base in pairs]),
        num_differing=count_differing(runs, baseline),
        repeated_8gram_share=float(repeated / total) if total else 0.0,
        num_low_repeat=sum(repeated_share(tokens) < LOW_REPEAT for tokens in outputs.values()),
        mean_acceptance_length_low_repeat=low_repeat_acceptance(runs),
        rounds=tuple(RoundFigures.of(run, base) for run, base in pairs),
        by_source=DraftsBySource.total(run.sources for run, _ in pairs).figures,
    )


@dataclass(frozen=True)
class _Totals:
    """Sums over runs. Rates are ratios of these sums, so that they are consistent."""

    seconds: float
    step_seconds: float
    steps: int
    tokens: int
    request_steps: int

    @classmethod
    def of(cls, runs: Sequence[Run]) -> "_Totals":
        names = "seconds", "step_seconds", "num_steps", "num_tokens", "num_request_steps"
        return cls(*(sum(getattr(run, name) for run in runs) for name in names))

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    @property
    def ms_per_step(self) -> float:
        return 1e3 * self.step_seconds / self.steps


def count_differing(runs: Sequence[Run], baseline: Sequence[Run]) -> int:
    """Count the prompts whose output differs from the baseline's output in any round."""
    differing = {
        key
        for run, base in zip(runs, baseline, strict=True)
        for key in base.outputs
        if run.outputs.get(key) != base.outputs[key]
    }
    return len(differing)


def low_repeat_acceptance(runs: Sequence[Run]) -> float | None:
    """Return the mean acceptance length of the outputs with little repetition.

    Return None if all outputs have much repetition, or if the batch size is above 1.
    """
    if any(len(run.outputs) > 1 for run in runs):
        return None
    low = [run for run in runs if all(repeated_share(t) < LOW_REPEAT for t in run.outputs.values())]
    num_request_steps = sum(run.num_request_steps for run in low)
    return sum(run.num_tokens for run in low) / num_request_steps if num_request_steps else None


def identity_line(figures: Sequence[Figures]) -> str | None:
    """Return the line that says whether outputs are identical to plain decoding's outputs.

    Return None if only plain decoding was measured. The line gives the number of prompts that ran
    under every configuration.
    """
    if len(figures) == 1:
        return None
    line = "outputs identical to plain decoding's, token for token:"
    if differing := [f for f in figures if f.num_differing]:
        counts = [f"{f.configuration}: {f.num_differing} of {f.num_outputs}" for f in differing]
        return f"{line} NO ({', '.join(counts)})"
    num_prompts = min(f.num_outputs for f in figures)
    return f"{line} yes ({num_prompts} {'prompt' if num_prompts == 1 else 'prompts'})"


def repetition_line(figures: Sequence[Figures]) -> str:
    """Return a line of text about repetition in outputs, which may inflate acceptance lengths."""
    plain = figures[0]
    num_high = plain.num_outputs - plain.num_low_repeat
    line = (
        f"repeated 8-grams: {plain.repeated_8gram_share:.1%} of the outputs; {num_high} of "
        f"{plain.num_outputs} outputs have {LOW_REPEAT:.0%} or more"
    )
    lengths = [(f, f.mean_acceptance_length_low_repeat) for f in figures if f.k]
    shown = [f"{length:.2f} ({f.configuration})" for f, length in lengths if length is not None]
    return f"{line}; without them AL is {', '.join(shown)}" if num_high and shown else line


def source_lines(figures: Sequence[Figures]) -> list[str]:
    """Return a line about the sources of drafts for each configuration that has several sources."""
    return [
        f"{one.configuration}, drafts accepted: "
        + ", ".join(
            f"{of['num_accepted']} of {of['num_draft_tokens']} of {name}"
            for name, of in one.by_source.items()
        )
        for one in figures
        if len(one.by_source) > 1
    ]


def cost_line(figures: Sequence[Figures], *, batch_size: int, platform: str) -> str | None:
    """Return a line of text about the cost of a round with drafts, and the tokens that it gives.

    Return None if no configuration has drafts. The line describes K = 3 if it was measured, else
    the smallest K. Of the drafters with this K, it describes the drafter that gains most.
    """
    drafted = [f for f in figures if f.k]
    if not drafted:
        return None
    k = 3 if any(f.k == 3 for f in drafted) else min(f.k for f in drafted)
    one = max((f for f in drafted if f.k == k), key=lambda f: f.times_plain)
    length = one.mean_acceptance_length
    line = (
        f"a round of {batch_size * (k + 1)} rows ({one.configuration}) costs "
        f"{one.plain_steps:.1f} plain steps on this {platform.upper()} and gives {length:.2f} "
        f"tokens instead of 1: {one.times_plain:.2f}x plain"
    )
    if platform == "gpu" or batch_size > 1 or k not in H100_MS:
        return line
    cost = H100_MS[k] / H100_MS[0]
    return (
        f"{line}; an H100 takes {cost:.1f} (Llama-3.1-8B with EAGLE-1: {H100_MS[k]} ms after "
        f"{H100_MS[0]} ms), where this acceptance length would give {length / cost:.1f}x"
    )


# Each header has two lines, so that the table fits 80 columns.
_HEADER = (
    "",
    "tokens\n/s",
    "plain\n/s",
    "x\nplain",
    "\np10-p90",
    "ms\n/step",
    "plain\nsteps",
    "\nAL",
    "accepted\nby position",
)
_FROM_LEFT = 0, len(_HEADER) - 1  # the other columns are numbers


def cells(figures: Figures) -> tuple[str, ...]:
    """Return the cells of a row of the table. Some are empty for plain decoding."""
    f, is_plain = figures, figures.method == PLAIN
    return (
        f.configuration,
        f"{f.tokens_per_second:.0f}",
        "" if is_plain else f"{f.plain_tokens_per_second:.0f}",
        f"{f.times_plain:.2f}",
        "" if is_plain else f"{f.ratio.p10:.2f}-{f.ratio.p90:.2f}",
        f"{f.ms_per_step:.2f}",
        f"{f.plain_steps:.2f}",
        f"{f.mean_acceptance_length:.2f}",
        " ".join(f"{share:.2f}".removeprefix("0") for share in f.acceptance_per_position),
    )


class TextTable:
    """Formats a table of figures as lines of text, which can be printed one by one."""

    def __init__(self, names: Sequence[str]):
        """`names` are the names of all rows, including rows that are not measured yet."""
        # A word that is split between the two lines, like "tokens/s", is joined without a space.
        header = [re.sub(r"\n(?=/)|^\n", "", name).replace("\n", " ") for name in _HEADER]
        figures = ("9999", "9999", "9.99", "9.99-9.99", "999.99", "9.99", "9.99", "")
        pairs = zip(header[1:], figures, strict=True)
        self._widths = [max(map(len, names)), *(max(map(len, pair)) for pair in pairs)]
        self.header = self._line(header)

    def line(self, figures: Figures) -> str:
        """Return a row as a line of text."""
        return self._line(cells(figures))

    def _line(self, row: Sequence[str]) -> str:
        return "  ".join(
            cell.ljust(width) if i in _FROM_LEFT else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, self._widths, strict=True))
        ).rstrip()


def rich_table(figures: Sequence[Figures]) -> Table:
    """Return the table for a terminal. The row with the largest speedup is highlighted."""
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="bold underline")
    for i, name in enumerate(_HEADER):
        justify = "left" if i in _FROM_LEFT else "right"
        table.add_column(name, justify=justify, no_wrap=True)
    best = max(figures, key=lambda f: f.times_plain, default=None)
    for f in figures:
        table.add_row(*cells(f), style="bold green" if f is best and f.k else None)
    return table
