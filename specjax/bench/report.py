"""Summary figures of runs, and the table that shows them."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TextIO

import numpy as np
from rich.console import Console
from rich.table import Table

from specjax.bench.measure import Configuration, Run
from specjax.bench.repetition import count_repeated, repeated_share

LOW_REPEAT = 0.1


@dataclass(frozen=True)
class Spread:
    """The median over rounds, and the tenth and ninetieth percentiles."""

    median: float
    p10: float
    p90: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        """Return the spread of at least one value."""
        p10, median, p90 = np.percentile(values, [10, 50, 90]).tolist()
        return cls(median, p10, p90)


@dataclass(frozen=True, kw_only=True)
class Figures:
    """Results of one configuration, of decoding only. Rates and times are medians over rounds.

    Attributes:
        num_tokens: decoded in all rounds, without first tokens, which prefill generates.
        tokens_per_second: of the whole batch.
        ms_per_token: time per output token of a request.
        mean_acceptance_length: tokens per step of a request.
        acceptance_per_position: share of steps whose draft at that position was accepted.
        ratio: tokens per second divided by plain decoding's in the same round.
        num_differing: prompts whose output tokens differ from plain decoding's.
        repeated_8gram_share: share of 8-grams that occurred earlier in the same output.
        num_low_repeat: number of outputs with a share below LOW_REPEAT.
        mean_acceptance_length_low_repeat: over those outputs; None if there are none, or if the
            batch size is above 1.
    """

    configuration: str
    method: str
    k: int
    num_outputs: int
    num_tokens: int
    num_steps: int
    seconds: float
    tokens_per_second: float
    ms_per_step: float
    ms_per_token: Spread
    mean_acceptance_length: float
    acceptance_per_position: tuple[float, ...]
    ratio: Spread
    num_differing: int
    repeated_8gram_share: float
    num_low_repeat: int
    mean_acceptance_length_low_repeat: float | None


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
        raise ValueError("no output came to a second token, so there is nothing to time")
    num_tokens = sum(run.num_tokens for run in runs)
    num_request_steps = sum(run.num_request_steps for run in runs)
    accepted = np.zeros(configuration.k)
    for run in runs:
        counts = run.num_accepted_per_pos[: configuration.k]
        accepted[: len(counts)] += counts
    outputs = {key: tokens for run in runs for key, tokens in run.outputs.items()}
    repeated, total = np.sum([count_repeated(tokens) for tokens in outputs.values()], axis=0)
    return Figures(
        configuration=configuration.name,
        method=configuration.method,
        k=configuration.k,
        num_outputs=len(outputs),
        num_tokens=num_tokens,
        num_steps=sum(run.num_steps for run in runs),
        seconds=sum(run.seconds for run in runs),
        tokens_per_second=Spread.of([run.tokens_per_second for run, _ in pairs]).median,
        ms_per_step=Spread.of([run.ms_per_step for run, _ in pairs]).median,
        ms_per_token=Spread.of([run.ms_per_token for run, _ in pairs]),
        mean_acceptance_length=num_tokens / num_request_steps,
        acceptance_per_position=tuple((accepted / num_request_steps).tolist()),
        ratio=Spread.of([run.tokens_per_second / base.tokens_per_second for run, base in pairs]),
        num_differing=count_differing(runs, baseline),
        repeated_8gram_share=float(repeated / total) if total else 0.0,
        num_low_repeat=sum(repeated_share(tokens) < LOW_REPEAT for tokens in outputs.values()),
        mean_acceptance_length_low_repeat=low_repeat_acceptance(runs),
    )


def count_differing(runs: Sequence[Run], baseline: Sequence[Run]) -> int:
    """Count the prompts whose output differs from the baseline's in any round."""
    differing = {
        key
        for run, base in zip(runs, baseline, strict=True)
        for key in base.outputs
        if run.outputs.get(key) != base.outputs[key]
    }
    return len(differing)


def low_repeat_acceptance(runs: Sequence[Run]) -> float | None:
    """Return `Figures.mean_acceptance_length_low_repeat`."""
    if any(len(run.outputs) > 1 for run in runs):
        return None
    low = [run for run in runs if all(repeated_share(t) < LOW_REPEAT for t in run.outputs.values())]
    num_request_steps = sum(run.num_request_steps for run in low)
    return sum(run.num_tokens for run in low) / num_request_steps if num_request_steps else None


def identity_line(figures: Sequence[Figures]) -> str:
    """Return the line on whether outputs are identical to plain decoding's."""
    num_prompts = figures[0].num_outputs
    differing = [f for f in figures if f.num_differing]
    if not differing:
        return (
            f"outputs identical to plain decoding's, token for token: yes ({num_prompts} prompts)"
        )
    counts = ", ".join(f"{f.configuration}: {f.num_differing}" for f in differing)
    return f"outputs identical to plain decoding's, token for token: NO ({counts} of {num_prompts})"


def repetition_line(plain: Figures) -> str:
    """Return the line on repetition, which may inflate acceptance lengths."""
    num_high = plain.num_outputs - plain.num_low_repeat
    return (
        f"repeated 8-grams: {plain.repeated_8gram_share:.1%} of the outputs; {num_high} of "
        f"{plain.num_outputs} outputs have {LOW_REPEAT:.0%} or more, and 'AL low-repeat' leaves "
        "them out"
    )


# Two lines each, so that the table fits 80 columns.
_HEADER = (
    "",
    "tokens\n/s",
    "x\nplain",
    "ms\n/step",
    "ms\n/token",
    "\np10-p90",
    "\nAL",
    "AL low-\nrepeat",
    "accepted\nby position",
)


def rows(figures: Sequence[Figures]) -> list[tuple[str, ...]]:
    """Return the table's cells."""
    return [
        (
            f.configuration,
            f"{f.tokens_per_second:.0f}",
            f"{f.ratio.median:.2f}",
            f"{f.ms_per_step:.2f}",
            f"{f.ms_per_token.median:.2f}",
            f"{f.ms_per_token.p10:.1f}-{f.ms_per_token.p90:.1f}",
            f"{f.mean_acceptance_length:.2f}",
            "-"
            if f.mean_acceptance_length_low_repeat is None
            else f"{f.mean_acceptance_length_low_repeat:.2f}",
            " ".join(f"{share:.2f}".removeprefix("0") for share in f.acceptance_per_position),
        )
        for f in figures
    ]


def show(figures: Sequence[Figures], lines: Sequence[str], stream: TextIO) -> None:
    """Print the table and `lines`: in colour on a terminal, otherwise as plain text."""
    if stream.isatty():
        console = Console(file=stream)
        console.print(_rich_table(figures))
        for line in lines:
            console.print(line, highlight=False, markup=False)
        return
    header = (re.sub(r"(?<!\w)\n|\n(?!\w)", "", name).replace("\n", " ") for name in _HEADER)
    cells = [tuple(header), *rows(figures)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for row in cells:
        text = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        print("  ".join(text).rstrip(), file=stream)
    print(file=stream)
    print(*lines, sep="\n", file=stream)


def _rich_table(figures: Sequence[Figures]) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="bold underline")
    for i, name in enumerate(_HEADER):
        justify = "left" if i in (0, len(_HEADER) - 1) else "right"
        table.add_column(name, justify=justify, no_wrap=True)
    best = max(figures, key=lambda f: f.ratio.median)
    for f, row in zip(figures, rows(figures), strict=True):
        table.add_row(*row, style="bold green" if f is best and f.k else None)
    return table
