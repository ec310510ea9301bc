"""Profiles of step times and acceptance rates, measured in advance and stored as JSON.

A file has the four keys that vLLM #32374 proposes. It may have a fifth key, "measured", which names
the model and the device that were measured. Times are per step, not per token. Rates are
unconditional. Every entry of a file is checked when the file is read.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from os import PathLike
from pathlib import Path
from reprlib import repr as shown
from typing import Any, NamedTuple

from specjax.checks import is_integer, is_number
from specjax.host.speculation.acceptance import expected_tokens
from specjax.host.speculation.step_cost import StepCost

MAX_BATCH = 2**16
# Milliseconds of a step, and maximum milliseconds per token of context. Far smaller or larger times
# are mistakes, with which goodput would be 0 or infinite.
MIN_MS, MAX_MS, MAX_CONTEXT_MS = 1e-6, 1e9, 1e3
_KEYS = (
    "is_online",
    "batch_stats",
    "max_num_speculative_tokens",
    "acceptance_rate_per_pos",
)
_OPTIONAL = "measured"
_CONTEXT = "ms_per_context_token", "ms_per_context_draft"  # optional keys of `Profile.measured`


class Comparison(NamedTuple):
    """The time per output token of each K, and the K with the shortest time, per batch size."""

    tpot_ms: dict[int, dict[int, float]]  # by batch size and K
    best_k: dict[int, int]  # by batch size; the smallest of equally good Ks


@dataclass(frozen=True)
class Profile:
    """Step times and acceptance rates from which K is chosen.

    Attributes:
        step_ms: milliseconds of a step, including drafting and verifying, by batch size and K.
            Every batch size has a time for K = 0 and for at least one other K.
        rates: the fractions of all steps in which at least 1, 2, ... drafts are accepted; one
            entry per draft.
        max_drafts: the largest K.
        is_online: whether a policy learns rates while serving, with `rates` as the prior.
        measured: a description of the measurement; None if it is unknown. "model" is the model's
            fingerprint, and "device" is the kind of device. If `step_ms` are times without context,
            each context token adds "ms_per_context_token" + K * "ms_per_context_draft" to a step.
    """

    step_ms: Mapping[int, Mapping[int, float]]
    rates: tuple[float, ...]
    max_drafts: int
    is_online: bool = False
    measured: Mapping[str, Any] | None = None

    @classmethod
    def read(cls, path: str | PathLike[str]) -> "Profile":
        """Read a profile from a file.

        Raises:
            ValueError: the file cannot be read or is not a profile. The message names the invalid
                entry.
        """
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise ValueError(
                f"{path}: cannot be read as a profile ({reason}); name a file that "
                "`specjax profile` wrote"
            ) from error
        try:
            content = json.loads(text, object_pairs_hook=_without_repeats)
        except _RepeatedKeyError as error:
            raise ValueError(f"{path}: {error}") from error
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path}: is not JSON ({error}); profile again") from error
        return cls.of(content, str(path))

    @classmethod
    def of(cls, content: Any, where: str) -> "Profile":
        """Return the profile in `content`, a parsed JSON file.

        `where` is the file's name in error messages.

        Raises:
            ValueError: an entry is invalid; the message names the entry.
        """
        _check_keys(content, where)
        max_drafts = content["max_num_speculative_tokens"]
        if not is_integer(max_drafts) or max_drafts < 1:
            raise ValueError(
                f"{where}: max_num_speculative_tokens={shown(max_drafts)} must be an integer of "
                "at least 1, the largest K"
            )
        if not isinstance(is_online := content["is_online"], bool):
            raise ValueError(
                f"{where}: is_online={shown(is_online)} must be true, to learn rates while "
                "serving, or false"
            )
        return cls(
            step_ms=_read_times(content["batch_stats"], max_drafts, where),
            rates=_read_rates(content["acceptance_rate_per_pos"], max_drafts, where),
            max_drafts=max_drafts,
            is_online=is_online,
            measured=_read_measured(content[_OPTIONAL], where) if _OPTIONAL in content else None,
        )

    def cost(self, ks: Sequence[int], batches: Sequence[int]) -> StepCost:
        """Return the times of rounds with each K in `ks`.

        Rounds are padded to the batch sizes `batches`. If `batches` is empty, they are not padded.
        """
        context: Any = {name: (self.measured or {}).get(name, 0.0) for name in _CONTEXT}
        return StepCost(self.step_ms, ks=ks, batches=batches, **context)

    def as_json(self) -> dict[str, Any]:
        """Return the content of the profile's file."""
        content = {
            "is_online": self.is_online,
            "batch_stats": {
                str(batch): {str(k): ms for k, ms in times.items()}
                for batch, times in self.step_ms.items()
            },
            "max_num_speculative_tokens": self.max_drafts,
            "acceptance_rate_per_pos": list(self.rates),
        }
        return content if self.measured is None else content | {_OPTIONAL: dict(self.measured)}

    def table(self, batch_sizes: Sequence[int]) -> Comparison:
        """Compare the time per output token of every K from 0 to `max_drafts`.

        The time per output token is the time of a step, divided by the number of tokens that a
        request gains in the step. Step times are interpolated linearly between batch sizes and
        between Ks.
        """
        cost, ks = StepCost(self.step_ms), range(self.max_drafts + 1)
        tokens = [expected_tokens(self.rates, k) for k in ks]
        tpot = {batch: {k: cost.ms(batch, k) / tokens[k] for k in ks} for batch in batch_sizes}
        best = {batch: min(row, key=row.__getitem__) for batch, row in tpot.items()}
        return Comparison(tpot, best)

    def as_table(self) -> tuple[tuple[int, int, int], ...]:
        """Return the best K of each range of batch sizes, as tuples (lo, hi, K).

        The ranges cover all batch sizes from 1 to the largest batch size in `step_ms`.
        """
        best = self.table(range(1, max(self.step_ms) + 1)).best_k
        ranges = [(k, list(run)) for k, run in groupby(best, key=best.__getitem__)]
        return tuple((run[0], run[-1], k) for k, run in ranges)


def mean_profile(profiles: Sequence[Profile], weights: Sequence[float]) -> Profile:
    """Return the weighted mean of profiles that have the same batch sizes and Ks.

    Times and rates are averaged. All other fields are from the first profile. If all weights are 0,
    all profiles have the same weight.
    """
    first, *_ = profiles
    total = sum(weights)
    shares = [w / total if total else 1 / len(profiles) for w in weights]

    def mean(values: Iterable[float]) -> float:
        return sum(share * value for share, value in zip(shares, values, strict=True))

    context = {
        name: mean((one.measured or {}).get(name, 0.0) for one in profiles) for name in _CONTEXT
    }
    return replace(
        first,
        step_ms={
            batch: {k: mean(one.step_ms[batch][k] for one in profiles) for k in times}
            for batch, times in first.step_ms.items()
        },
        rates=tuple(map(mean, zip(*(one.rates for one in profiles), strict=True))),
        measured={**(first.measured or {}), **context},
    )


class _RepeatedKeyError(ValueError):
    pass


def _without_repeats(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Build a JSON object. Refuse repeated keys: Python would silently use the last value."""
    content: dict[str, Any] = {}
    for key, value in pairs:
        if key in content:
            raise _RepeatedKeyError(
                f'"{key}" is twice in one object, as {shown(content[key])} and as {shown(value)}; '
                "leave one out"
            )
        content[key] = value
    return content


def _check_keys(content: Any, where: str) -> None:
    if not isinstance(content, Mapping):
        raise ValueError(f"{where}: must hold a JSON object with {', '.join(_KEYS)}")
    known = (*_KEYS, _OPTIONAL)
    if unknown := [key for key in content if key not in known]:
        raise ValueError(
            f"{where}: has unknown keys {shown(unknown)}; leave them out: known keys are "
            f"{', '.join(known)}"
        )
    if missing := [key for key in _KEYS if key not in content]:
        raise ValueError(f"{where}: lacks {', '.join(missing)}; add them, or profile again")


def _read_times(stats: Any, max_drafts: int, where: str) -> dict[int, dict[int, float]]:
    name = f"{where}: batch_stats"
    if not isinstance(stats, Mapping) or not stats:
        raise ValueError(
            f"{name}={shown(stats)} must be an object of batch sizes, each with milliseconds per "
            'step by K, like {"1": {"0": 6.5, "3": 8.8}}'
        )
    step_ms = {}
    for key, times in stats.items():
        entry, batch = _entry(name, key), _integer_of(key)
        if batch is None or not 1 <= batch <= MAX_BATCH:
            raise ValueError(
                f"{entry}: a batch size must be an integer in 1..{MAX_BATCH}, written in digits "
                "only; correct the key"
            )
        step_ms[batch] = _read_row(times, max_drafts, entry)
    return step_ms


def _read_row(times: Any, max_drafts: int, name: str) -> dict[int, float]:
    """Return the milliseconds per step of one batch size, by K."""
    if not isinstance(times, Mapping):
        raise ValueError(f"{name}={shown(times)} must be an object, milliseconds per step by K")
    row = {}
    for key, ms in times.items():
        entry, k = f"{_entry(name, key)}={shown(ms)}", _integer_of(key)
        if k is None or not 0 <= k <= max_drafts:
            raise ValueError(
                f"{entry}: K must be an integer in 0..{max_drafts}, max_num_speculative_tokens, "
                "written in digits only; correct the key, or raise it"
            )
        if not is_number(ms) or not MIN_MS <= ms <= MAX_MS:
            raise ValueError(
                f"{entry} must be in {MIN_MS:g}..{MAX_MS:g}, milliseconds per step; measure it "
                "again, or leave it out"
            )
        row[k] = float(ms)
    if 0 not in row:
        raise ValueError(f"{name} lacks K=0, decoding without drafts, to compare with; measure it")
    if len(row) == 1:
        raise ValueError(f"{name} has only K=0, so drafts' cost is unknown; measure another K")
    return row


def _read_rates(rates: Any, max_drafts: int, where: str) -> tuple[float, ...]:
    name = f"{where}: acceptance_rate_per_pos"
    if not isinstance(rates, list | tuple) or len(rates) != max_drafts:
        raise ValueError(
            f"{name}={shown(rates)} must list {max_drafts} rates, as many as "
            "max_num_speculative_tokens; correct the list, or that number"
        )
    for i, rate in enumerate(rates):
        if not is_number(rate) or not 0 <= rate <= 1:
            raise ValueError(
                f"{name}[{i}]={shown(rate)} must be a number in [0, 1], the fraction of all steps "
                f"that accept at least {i + 1} drafts"
            )
    for i, (before, rate) in enumerate(pairwise(rates), start=1):
        if rate > before:
            raise ValueError(
                f"{name}[{i}]={shown(rate)} exceeds the {shown(before)} before it; rates are "
                "unconditional, of all steps: multiply conditional ones, each with all before it"
            )
    return tuple(map(float, rates))


def _read_measured(measured: Any, where: str) -> dict[str, Any]:
    if not isinstance(measured, Mapping):
        raise ValueError(
            f"{where}: measured={shown(measured)} must be an object that says what was measured; "
            "leave it out if that is unknown"
        )
    for key, what in (("model", "fingerprint of the model"), ("device", "kind of the device")):
        if not isinstance(value := measured.get(key, ""), str):
            raise ValueError(
                f'{where}: measured["{key}"]={shown(value)} must be a text, the {what} that was '
                "measured; leave it out if that is unknown"
            )
    for name in _CONTEXT:
        if not is_number(ms := measured.get(name, 0.0)) or not 0 <= ms <= MAX_CONTEXT_MS:
            raise ValueError(
                f'{where}: measured["{name}"]={shown(ms)} must be milliseconds in '
                f"0..{MAX_CONTEXT_MS:g}; leave it out if that is unknown"
            )
    return dict(measured)


def _entry(name: str, key: Any) -> str:
    return f'{name}["{str(key)[:30]}"]'


def _integer_of(key: Any) -> int | None:
    """Return the integer that a JSON key spells in canonical form; None if it spells none.

    For example, "1" is canonical, but "01" and " 1" are not.
    """
    is_canonical = isinstance(key, str) and len(key) <= 9 and key.isdecimal() and key.isascii()
    return int(key) if is_canonical and (key == "0" or key[0] != "0") else None
