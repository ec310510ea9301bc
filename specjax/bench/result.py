"""The JSON that `specjax bench latency`, `throughput` and `serve` write.

The top level has the keys of `vllm bench`, in vLLM's order. One further key, "specjax", has an
object with the fields of `Details`: what vLLM does not report.
"""

import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from itertools import zip_longest
from typing import Any

import numpy as np

SCHEMA_VERSION = 1
KEY = "specjax"  # the key of everything that vLLM does not measure
NEAR_TIE = 2e-4  # scores this near may be swapped by rounding; see `identity`


@dataclass(frozen=True)
class Distribution:
    """Summary figures of a list of measurements.

    Attributes:
        std: the standard deviation of the population (the divisor is the number of measurements).
        quantiles: the 0th to the 100th percentile, interpolated linearly.
    """

    count: int
    mean: float
    median: float
    std: float
    min: float
    max: float
    p90: float
    p99: float
    quantiles: tuple[float, ...]

    @classmethod
    def of(cls, values: Sequence[float]) -> "Distribution | None":
        """Return the distribution of `values`; None if there are none."""
        if not len(values):
            return None
        array = np.asarray(values, float)
        quantiles = tuple(np.percentile(array, range(101)).tolist())
        return cls(
            count=len(array),
            mean=float(array.mean()),
            median=quantiles[50],
            std=float(array.std()),
            min=quantiles[0],
            max=quantiles[100],
            p90=quantiles[90],
            p99=quantiles[99],
            quantiles=quantiles,
        )


@dataclass(frozen=True)
class Accepted:
    """Counts of draft tokens. Rounds without drafts are not counted.

    Attributes:
        num_drafts: number of rounds with drafts. A round counts once for each request that has
            drafts in it. The name is vLLM's.
        accepted_per_position: number of accepted draft tokens by position within the draft.
        drafted_per_position: number of draft tokens by position; empty if unknown.
    """

    num_drafts: int = 0
    num_draft_tokens: int = 0
    accepted_per_position: tuple[int, ...] = ()
    drafted_per_position: tuple[int, ...] = ()

    @classmethod
    def of_rounds(cls, rounds: Sequence[tuple[int, int]]) -> "Accepted":
        """Return the sums over `rounds`, pairs of numbers (draft tokens, accepted draft tokens)."""
        most = max((num_drafts for num_drafts, _ in rounds), default=0)
        return cls(
            num_drafts=len(rounds),
            num_draft_tokens=sum(num_drafts for num_drafts, _ in rounds),
            accepted_per_position=tuple(sum(a > i for _, a in rounds) for i in range(most)),
            drafted_per_position=tuple(sum(d > i for d, _ in rounds) for i in range(most)),
        )

    def __add__(self, other: "Accepted") -> "Accepted":
        return Accepted(
            self.num_drafts + other.num_drafts,
            self.num_draft_tokens + other.num_draft_tokens,
            _added(self.accepted_per_position, other.accepted_per_position),
            _added(self.drafted_per_position, other.drafted_per_position),
        )

    @property
    def num_accepted(self) -> int:
        """The number of accepted draft tokens."""
        return sum(self.accepted_per_position)

    def as_json(self) -> dict[str, Any]:
        """Return the counts, and rates computed from them.

        As in vLLM, `rates_per_position` are fractions of the rounds. So the acceptance length is 1
        plus their sum.
        """
        drafts, tokens = self.num_drafts, self.num_draft_tokens
        return asdict(self) | {
            "num_accepted": self.num_accepted,
            "acceptance_rate": self.num_accepted / tokens if tokens else None,
            "acceptance_length": 1 + self.num_accepted / drafts if drafts else None,
            "rates_per_position": [one / drafts for one in self.accepted_per_position],
        }


def _added(one: Sequence[int], other: Sequence[int]) -> tuple[int, ...]:
    return tuple(a + b for a, b in zip_longest(one, other, fillvalue=0))


@dataclass(kw_only=True)
class Speculation:
    """Counts and times of speculation. A field is None or empty if the engine does not report it.

    Attributes:
        total: `Accepted.as_json` of all requests.
        by_group: `Accepted.as_json` of each group of the data set, such as a kind of questions.
        by_source: the result of the function `by_source`. A source of drafts is the drafter's
            method, or a source on the host such as "suffix".
        k_histogram: number of rounds by K; K = 0 is plain decoding.
        ms_per_round: mean milliseconds of a round by K, at the batch sizes that occurred.
        round_over_plain: time of a round with drafts, divided by the time of a plain step, by K.
        host_ms: mean time per step in which the host worked: planned and launched the step, and
            handed out its tokens.
        wait_ms: mean time per step in which the host waited for the device.
        device_ms: upper bound of a round's mean time on the device. It may include time in which
            the device waited for the host.
        synthetic_rates: rates at which drafts were accepted regardless of their tokens.
    """

    total: dict[str, Any] | None = None
    by_group: dict[str, dict[str, Any]] = field(default_factory=dict)
    by_source: dict[str, dict[str, Any]] = field(default_factory=dict)
    k_histogram: dict[str, int] = field(default_factory=dict)
    ms_per_round: dict[str, float] = field(default_factory=dict)
    round_over_plain: dict[str, float] = field(default_factory=dict)
    host_ms: float | None = None
    wait_ms: float | None = None
    device_ms: float | None = None
    synthetic_rates: Sequence[float] | None = None


@dataclass(kw_only=True)
class Peer:
    """The results of another engine, or of another server, on the same requests.

    Attributes:
        figures: the peer's figures, under the same keys as this engine's at the top level.
        ratios: this engine's figure divided by the peer's, by key.
        outputs: how many outputs are the same; see `compare_outputs` in `peers.peer`. None if no
            request was completed by both engines.
        rounds: the peer's figures in each repetition of the run.
    """

    name: str
    version: str | None
    figures: dict[str, Any]
    ratios: dict[str, float]
    outputs: dict[str, Any] | None
    rounds: list[dict[str, float]] = field(default_factory=list)


@dataclass(kw_only=True)
class Details:
    """The object under the key "specjax". Names of times in milliseconds end in `_ms`.

    Attributes:
        benchmark: "latency", "throughput" or "serve".
        settings: the options of the run.
        environment: versions, device, clocks, processor, commit; see `provenance.describe`.
        machine: signs of other programs on the machine; `doubts` lists reasons not to trust the
            times.
        dataset: name, path, number of requests per group, chat template and its variables, and how
            many rows were left out or repeated.
        is_interrupted: whether the run ended early. Then the figures cover only its beginning.
        rounds: the main figures of each repetition, under their keys at the top level.
        distributions: `Distribution` by name: ttft_ms, tpot_ms, itl_ms, e2el_ms, queue_ms,
            tokens_per_chunk; None if there are no measurements.
        steady: figures of the steady window, in which the number of running requests is about
            constant. The window begins when every request has its first token, and ends when the
            first request ends. If a request ends before all requests have their first token, the
            window is from 10 % to 90 % of the run. `serve` only.
        arrivals: the intended distribution of arrival times, and the p-value of a test whether the
            actual times follow this distribution.
        goodput: limits of latency, and how many requests meet the limits.
        timeline: output tokens and running requests of each second. "k_histograms" has samples of a
            histogram: the number of rounds with each K since the start of the run.
        warm_up: how the engine was warmed up (see `WarmUp`); None if it was not. `latency` and
            `throughput` only.
        num_compiles: number of programs that became ready during the measurement. For `serve`, the
            number of programs that requests waited for; None if the server does not report it.
        failures: number of failed requests by error.
        lossless: outputs compared with plain decoding: {"num_outputs", "num_tokens", "near_ties",
            "mismatches"}.
    """

    benchmark: str
    settings: dict[str, Any]
    environment: dict[str, Any]
    machine: dict[str, Any]
    dataset: dict[str, Any]
    is_interrupted: bool = False
    rounds: list[dict[str, float]] = field(default_factory=list)
    distributions: dict[str, Distribution | None] = field(default_factory=dict)
    steady: dict[str, Any] | None = None
    arrivals: dict[str, Any] | None = None
    goodput: dict[str, Any] | None = None
    timeline: dict[str, Any] | None = None
    speculation: Speculation | None = None
    warm_up: dict[str, Any] | None = None
    num_compiles: int | None = None
    failures: dict[str, int] = field(default_factory=dict)
    lossless: dict[str, Any] | None = None
    peers: list[Peer] = field(default_factory=list)
    schema_version: int = SCHEMA_VERSION
    timestamp: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))
    command: list[str] = field(default_factory=lambda: without_headers(sys.argv[1:]))


def without_headers(argv: Sequence[str]) -> list[str]:
    """Return a command's arguments without the values of --header, which may be secret."""
    shown: list[str] = []
    for word in argv:
        option, _, pair = word.partition("=")
        if shown[-1:] == ["--header"]:
            word = f"{option}=..."
        elif option == "--header" and pair:
            word = f"{option}={pair.partition('=')[0]}=..."
        shown.append(word)
    return shown


def as_json(top: Mapping[str, Any], details: Details) -> dict[str, Any]:
    """Return a whole result: `top`, which has vLLM's keys, then the details."""
    return {**top, KEY: asdict(details)}


def cells_as_json(model: str, results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the result of `bench sweep serve`.

    `results` are the results of `bench serve` for each rate and concurrency.
    """
    made = datetime.now(UTC).isoformat(timespec="seconds")
    body = {
        **{"benchmark": "sweep serve", "schema_version": SCHEMA_VERSION, "timestamp": made},
        "command": without_headers(sys.argv[1:]),
    }
    return {"model_id": model, "results": list(results), KEY: body}


def vllm_speculation(counts: Accepted | None) -> dict[str, Any]:
    """Return the figures of speculation with the keys of `vllm bench serve`; {} without drafts."""
    if counts is None or not counts.num_drafts:
        return {}
    figures = counts.as_json()
    return {
        "spec_decode_acceptance_rate": 100 * figures["acceptance_rate"],
        "spec_decode_acceptance_length": figures["acceptance_length"],
        "spec_decode_num_drafts": counts.num_drafts,
        "spec_decode_draft_tokens": counts.num_draft_tokens,
        "spec_decode_accepted_tokens": counts.num_accepted,
        "spec_decode_per_position_acceptance_rates": figures["rates_per_position"],
    }


def by_source(
    drafts: Mapping[str, float], tokens: Mapping[str, float], accepted: Mapping[str, float]
) -> dict[str, dict[str, Any]]:
    """Return counts and acceptance of each source of drafts.

    Args:
        drafts: the number of rounds with drafts from each source. A round counts once for each
            request that got drafts from the source.
        tokens: the number of draft tokens from each source.
        accepted: the number of accepted draft tokens from each source.
    """
    return {
        name: {
            "num_drafts": int(count),
            "num_draft_tokens": int(tokens[name]),
            "num_accepted": int(accepted[name]),
            "acceptance_rate": accepted[name] / tokens[name] if tokens[name] else None,
            "acceptance_length": 1 + accepted[name] / count,
        }
        for name, count in drafts.items()
        if count
    }


def count_failures(errors: Sequence[str]) -> dict[str, int]:
    """Return the number of failed requests by error, the most frequent first."""
    return dict(Counter(errors).most_common())
