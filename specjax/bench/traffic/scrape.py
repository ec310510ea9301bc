"""Reads a server's counters of speculation and compilation from its /metrics."""

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from specjax.bench.result import Accepted, by_source

_DRAFTS = "vllm:spec_decode_num_drafts"
_TOKENS = "vllm:spec_decode_num_draft_tokens"
_ACCEPTED = "vllm:spec_decode_num_accepted_tokens_per_pos"
_ROUNDS = "specjax:spec_decode_num_rounds"
_SOURCES = [
    f"specjax:spec_decode_{name}_per_source"
    for name in ("drafts", "draft_tokens", "accepted_tokens")
]
_STEPS = "specjax:num_steps"
_LATE, _COMPILING = "specjax:num_compiles_after_warmup", "specjax:num_compiling"
_HOST, _WAIT = "specjax:host_seconds", "specjax:wait_seconds"


@dataclass(frozen=True)
class Counters:
    """The values of a server's Prometheus metrics.

    Attributes:
        totals: for each metric, the sum over all combinations of its labels.
        by_label: for each metric, the sum for each value of its label "position", "k" or "source".
    """

    totals: dict[str, float] = field(default_factory=dict)
    by_label: dict[str, dict[str, float]] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str) -> "Counters":
        """Read Prometheus' text format.

        Raises:
            ValueError: the text is malformed.
        """
        totals: defaultdict[str, float] = defaultdict(float)
        by_label: defaultdict[str, defaultdict[str, float]] = defaultdict(
            lambda: defaultdict(float)
        )
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                name = sample.name.removesuffix("_total")
                totals[name] += sample.value
                for label in "position", "k", "source":
                    if label in sample.labels:
                        by_label[name][sample.labels[label]] += sample.value
        return cls(dict(totals), {name: dict(values) for name, values in by_label.items()})

    def since(self, before: "Counters") -> "Counters":
        """Return the growth from `before` to now."""
        return Counters(
            {name: value - before.totals.get(name, 0) for name, value in self.totals.items()},
            {
                name: {
                    label: value - before.by_label.get(name, {}).get(label, 0)
                    for label, value in values.items()
                }
                for name, values in self.by_label.items()
            },
        )

    @property
    def accepted(self) -> Accepted | None:
        """The counts of drafts; None if the server does not report them."""
        if _DRAFTS not in self.totals:
            return None
        by_position = self.by_label.get(_ACCEPTED, {})
        return Accepted(
            num_drafts=int(self.totals[_DRAFTS]),
            num_draft_tokens=int(self.totals.get(_TOKENS, 0)),
            accepted_per_position=tuple(
                int(by_position[key]) for key in sorted(by_position, key=int)
            ),
        )

    @property
    def k_histogram(self) -> dict[str, int]:
        """The number of rounds by K; empty if the server does not report it."""
        rounds = self.by_label.get(_ROUNDS, {})
        return {k: int(rounds[k]) for k in sorted(rounds, key=int) if rounds[k]}

    @property
    def by_source(self) -> dict[str, dict[str, Any]]:
        """Counts and acceptance by source of drafts; empty if the server does not report them."""
        return by_source(*(self.by_label.get(name, {}) for name in _SOURCES))

    @property
    def num_compiles(self) -> int | None:
        """The number of compilations that delayed requests; None if it is not reported."""
        return int(self.totals[_LATE]) if _LATE in self.totals else None

    @property
    def is_compiling(self) -> bool:
        """Whether the server reports that it is compiling."""
        return self.totals.get(_COMPILING, 0) > 0

    def ms_per_step(self, *, is_wait: bool) -> float | None:
        """Return the host's mean time per step, in milliseconds.

        If `is_wait`, this is the time that the host waits for the device; else the time that the
        host works. Return None if the server does not report the times.
        """
        steps = self.totals.get(_STEPS, 0)
        seconds = self.totals.get(_WAIT if is_wait else _HOST)
        return 1e3 * seconds / steps if steps and seconds is not None else None


async def scrape(session: aiohttp.ClientSession, root: str) -> Counters | None:
    """Return the metrics of the server at `root`; None if /metrics cannot be read."""
    try:
        async with session.get(f"{root}/metrics") as response:
            if response.status != 200:
                return None
            return Counters.parse(await response.text())
    except (aiohttp.ClientError, OSError, TimeoutError, ValueError):
        return None
