"""Compares two results of the same workload, or the means of repeated results."""

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from specjax.bench.reports.content import brief
from specjax.bench.reports.noise import (
    Interval,
    of_pairs,
    of_requests,
    of_rounds,
    values_per_request,
)
from specjax.bench.reports.saved import Saved

# Figures that are compared, by their keys. Of rates, more is better; of times, less.
_RATES = re.compile(
    r"\w+_throughput|request_goodput|(requests|tokens|output_tokens)_per_second|times_plain"
    r"|(mean_)?acceptance_length"
)
_TIMES = re.compile(r"avg_latency|(mean|median|p[\d.]+)_(ttft|tpot|itl|e2el)_ms|ms_per_step")
_OF_REQUESTS = re.compile(r"(mean|median|p[\d.]+)_(ttft|tpot|itl|e2el)_ms")
# Settings that are part of the workload, besides the data set.
_WORKLOAD = (
    *("input_len", "output_len", "max_tokens", "ignore_eos", "seed", "batch_size", "num_prompts"),
    *("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "frequency_penalty"),
    *("presence_penalty", "backend", "extra_body", "request_rate", "burstiness"),
    *("max_concurrency", "ramp_up_strategy", "ramp_up_start_rps", "ramp_up_end_rps"),
)
_UNSHOWN = re.compile(  # options that only name files, or label a result
    r"json|output|output_json|report|label|metadata|save_\w+|result_\w+|dataset_path|subcommand|full"
)


@dataclass(frozen=True, kw_only=True)
class Change:
    """The value of a figure in two results, or its means over repeated results.

    Attributes:
        interval: 95 % confidence interval of `ratio`; None if the results have too few values to
            estimate it.
        source: the values that `interval` is estimated from, such as "3 and 3 rounds"; "" if there
            is no interval.
    """

    key: str
    before: float
    after: float
    interval: Interval | None
    source: str

    @property
    def ratio(self) -> float:
        """The figure in the second result, divided by the figure in the first."""
        return self.after / self.before

    @property
    def is_beyond_noise(self) -> bool | None:
        """Whether `interval` excludes a ratio of 1; None if `interval` is None."""
        return None if self.interval is None else not self.interval[0] <= 1 <= self.interval[1]

    @property
    def worse(self) -> float:
        """By how many per cent the second result is worse; below 0 if it is better."""
        more = 100 * (self.ratio - 1)
        return more if _TIMES.fullmatch(self.key.split(": ")[-1]) else -more


@dataclass(frozen=True)
class ResultChanges:
    """The comparison of two results.

    Attributes:
        settings: the settings that differ, as pairs of values by name.
        changes: the figures that both results have, except figures that are 0 in the first.
    """

    settings: Mapping[str, tuple[Any, Any]]
    changes: list[Change]


def compare(before: Sequence[Saved], after: Sequence[Saved]) -> ResultChanges:
    """Compare results from before a change with results from after it.

    If `before` or `after` has several results, they come from repeated runs, and their means are
    compared.

    Raises:
        ValueError: workloads differ, settings of repeated runs differ, or a result was made by
            `bench sweep serve`.
    """
    first, *others = [*before, *after]
    if any(saved.cells for saved in (first, *others)):
        raise ValueError("compare cells of sweeps: --save-result writes a file for each of them")
    for other in others:
        _refuse(_differing(_workload(first), _workload(other)), "are of different workloads")
    for one, *repeated in before, after:
        for other in repeated:
            _refuse(_differing(_settings(one), _settings(other)), "of one side differ")
    sides = [[_figures(saved) for saved in side] for side in (before, after)]
    shared = [key for key in sides[0][0] if all(key in one for side in sides for one in side)]
    changes = []
    for key in shared:
        values = [[one[key] for one in side] for side in sides]
        if not all(values[0]):
            continue
        interval, source = _interval(key, before, after, values)
        means = [fmean(one) for one in values]
        changes.append(
            Change(key=key, before=means[0], after=means[1], interval=interval, source=source)
        )
    return ResultChanges(_differing(_settings(before[0]), _settings(after[0])), changes)


def _refuse(differing: Mapping[str, tuple[Any, Any]], why: str) -> None:
    if differing:
        fields = "; ".join(f"{n}: {brief(a)} and {brief(b)}" for n, (a, b) in differing.items())
        raise ValueError(f"the results {why}, so no figures compare: {fields}")


def _interval(
    key: str, before: Sequence[Saved], after: Sequence[Saved], values: Sequence[Sequence[float]]
) -> tuple[Interval | None, str]:
    """Return the fields `interval` and `source` of a figure's `Change`.

    `key` is the key of the figure. `values` has two lists: the figure's values in the results
    `before`, and its values in the results `after`.
    """
    if max(len(before), len(after)) > 1:
        return _named(of_rounds(*values), f"{len(before)} and {len(after)} runs")
    (first,), (second,) = before, after
    if first.details is None:
        pairs = [_by_prompts(saved, key) for saved in (first, second)]
        return _named(of_pairs(*pairs), f"{len(pairs[0].keys() & pairs[1].keys())} pairs")
    rounds = [
        [one[key] for one in saved.details.rounds if key in one] if saved.details else []
        for saved in (first, second)
    ]
    if (found := of_rounds(*rounds)) is not None:
        return found, " and ".join(str(len(one)) for one in rounds) + " rounds"
    if (match := _OF_REQUESTS.fullmatch(key)) is None:
        return None, ""
    requests = [values_per_request(saved, match[2]) for saved in (first, second)]
    if requests[0] is None or requests[1] is None:
        return None, ""
    return _named(of_requests(match[1], requests[0], requests[1]), "requests")


def _named(interval: Interval | None, source: str) -> tuple[Interval | None, str]:
    return interval, source if interval is not None else ""


def _by_prompts(saved: Saved, key: str) -> dict[tuple[int, ...], list[float]]:
    """Return the values of a figure by batch of prompts, from the rounds of `bench speculation`.

    Each round decodes one batch. A batch has several values if several rounds decode it.
    """
    name, _, figure = key.rpartition(": ")
    found: defaultdict[tuple[int, ...], list[float]] = defaultdict(list)
    for one in saved.top["configurations"]:
        if one["configuration"] == name:
            for of_round in one.get("rounds", ()):
                if figure in of_round:
                    found[tuple(of_round["prompts"])].append(of_round[figure])
    return found


def _figures(saved: Saved) -> dict[str, float]:
    """Return the numbers in a result that can be compared with another result, by key."""
    if saved.details is None:
        named = {
            f"{one['configuration']}: {key}": value
            for one in saved.top["configurations"]
            for key, value in one.items()
        }
    else:
        named = dict(saved.top)
        speculation = saved.details.speculation
        if speculation is not None and speculation.total is not None:
            named["acceptance_length"] = speculation.total["acceptance_length"]
    keys = [key for key in named if _is_figure(key.split(": ")[-1])]
    return {key: named[key] for key in keys if isinstance(named[key], int | float)}


def _is_figure(key: str) -> bool:
    return bool(_RATES.fullmatch(key) or _TIMES.fullmatch(key))


def _workload(saved: Saved) -> dict[str, Any]:
    """Return the fields that must be equal in compared results, such as prompts and load."""
    found = {"benchmark": saved.benchmark}
    if saved.details is not None:
        data = saved.details.dataset
        found |= {f"dataset {k}": v for k, v in data.items() if k not in ("path", "notes")}
    settings = _given(saved)
    return found | {name: settings[name] for name in _WORKLOAD if name in settings}


def _settings(saved: Saved) -> dict[str, Any]:
    """Return fields that may differ: other settings, versions and hardware."""
    settings = {k: v for k, v in _given(saved).items() if not _UNSHOWN.fullmatch(k)}
    environment = dict(saved.details.environment if saved.details else saved.top["environment"])
    environment.pop("clocks", None)  # they vary from run to run
    versions = {f"version of {k}": v for k, v in environment.pop("versions").items()}
    return {**settings, **versions, **environment}


def _given(saved: Saved) -> Mapping[str, Any]:
    return saved.top["settings"] if saved.details is None else saved.details.settings


def _differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    return {
        name: (one.get(name), other.get(name))
        for name in {**one, **other}
        if one.get(name) != other.get(name)
    }
