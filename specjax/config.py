"""Frozen configuration. Every value is checked once, here, before any work starts."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from numbers import Integral, Real
from os import PathLike
from typing import Any

from pallas_kernels.dispatch import KERNELS

DTYPES = ("float32", "bfloat16")
METHODS = ("eagle", "eagle3", "mtp")
OWN_METHODS = ("mtp",)  # whose weights may come with the target
AUX_ID_CONVENTIONS = ("entering", "output")
DRAFT_SAMPLE_METHODS = ("probabilistic", "greedy")
VERIFICATIONS = ("seed_exact", "rejection", "block", "synthetic")
LOGPROBS_MODES = ("raw", "processed")
# The one shape of exact mode, the same for engines of any smaller size: requests of a round, rows
# of each, and tokens of a chunk.
EXACT_BATCH, EXACT_WIDTH, EXACT_CHUNK = 16, 8, 32


def _check_choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name}={value!r} is not supported; choose one of {', '.join(choices)}")


def check_positive(**values: int) -> None:
    """Refuse values that are not integers of at least 1."""
    for name, value in values.items():
        if not isinstance(value, Integral) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{name}={value!r} must be an integer of at least 1")


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


@dataclass(frozen=True, kw_only=True)
class SpeculativeConfig:
    """How drafts are made.

    Attributes:
        method: "eagle" (EAGLE-1), "eagle3", or "mtp", the target's own module.
        model: the drafter's checkpoint, a folder or hub id; for "mtp" None is the target's.
        num_speculative_tokens: K, drafts per step.
        verification: "seed_exact" emits what decoding without drafts would emit; "rejection" and
            "block" emit the same distribution, accepting more of probabilistic drafts;
            "synthetic" accepts drafts at given rates, to measure speed.
        synthetic_acceptance_rates: of all steps, the part that accepts at least 1, 2, ... drafts;
            one per draft, none above the one before.
        synthetic_acceptance_length: instead, the mean number of tokens per step, in 1..K+1.
        draft_sample_method: above temperature 0, "probabilistic" drafts are drawn, under seed_exact
            with the target's noise; "greedy" drafts are always the argmax.
        aux_id_convention: how an EAGLE-3 config numbers auxiliary hidden states: "entering" layer
            i (vLLM, the default), or "output" of 0-based layer i (SGLang).
    """

    method: str
    num_speculative_tokens: int
    model: str | None = None
    verification: str = "seed_exact"
    synthetic_acceptance_rates: Sequence[float] | None = None
    synthetic_acceptance_length: float | None = None
    draft_sample_method: str = "probabilistic"
    aux_id_convention: str = "entering"

    def __post_init__(self):
        _check_choice("speculative_config.method", self.method, METHODS)
        is_own = self.model is None and self.method in OWN_METHODS
        if not is_own and not isinstance(self.model, str | PathLike):
            raise ValueError(f"speculative_config.model={self.model!r} must be a folder or hub id")
        _check_choice(
            "speculative_config.draft_sample_method", self.draft_sample_method, DRAFT_SAMPLE_METHODS
        )
        _check_choice(
            "speculative_config.aux_id_convention", self.aux_id_convention, AUX_ID_CONVENTIONS
        )
        check_positive(**{"speculative_config.num_speculative_tokens": self.num_speculative_tokens})
        _check_choice("speculative_config.verification", self.verification, VERIFICATIONS)
        self._check_synthetic()

    def _check_synthetic(self) -> None:
        rates, length = self.synthetic_acceptance_rates, self.synthetic_acceptance_length
        where, k = "speculative_config.synthetic_acceptance", self.num_speculative_tokens
        if self.verification != "synthetic":
            if rates is not None or length is not None:
                raise ValueError(
                    f"{where}_rates and _length go with verification='synthetic', not "
                    f"{self.verification!r}"
                )
            return
        if (rates is None) == (length is None):
            raise ValueError(f"verification='synthetic' needs {where}_rates or {where}_length")
        if rates is not None:
            listed = list(rates) if isinstance(rates, Iterable) else []
            is_rates = len(listed) == k and all(map(_is_number, listed))
            if not is_rates or not all(0 <= b <= a for a, b in pairwise([1.0, *listed])):
                raise ValueError(
                    f"{where}_rates={rates!r} must be {k} rates in [0, 1], one per draft, none "
                    "above the one before: each counts the steps that accept so many drafts"
                )
            object.__setattr__(self, "synthetic_acceptance_rates", tuple(map(float, listed)))
        if length is not None:
            if not _is_number(length) or not 1 <= length <= k + 1:
                raise ValueError(
                    f"{where}_length={length!r} must be in 1..{k + 1}, tokens per step"
                )
            object.__setattr__(self, "synthetic_acceptance_length", float(length))

    @property
    def synthetic_rates(self) -> tuple[float, ...]:
        """The rates, or those of least variance that give the length: ones, the rest, zeros."""
        if self.synthetic_acceptance_rates is not None:
            return tuple(self.synthetic_acceptance_rates)
        drafts = (self.synthetic_acceptance_length or 1) - 1
        return tuple(min(max(drafts - i, 0.0), 1.0) for i in range(self.num_speculative_tokens))

    @classmethod
    def of(cls, config: "SpeculativeConfig | Mapping[str, Any]") -> "SpeculativeConfig":
        """A config from a mapping; unknown and missing keys are errors that name them."""
        if isinstance(config, SpeculativeConfig):
            return config
        if not isinstance(config, Mapping):
            raise ValueError(
                f"speculative_config={config!r} must be a SpeculativeConfig or a mapping of its "
                "fields"
            )
        known = {f.name for f in fields(cls)}
        if unknown := sorted(set(config) - known):
            raise ValueError(
                f"speculative_config has unknown keys {unknown}; known keys are {sorted(known)}"
            )
        needed = {"method", "num_speculative_tokens"}
        if config.get("method") not in OWN_METHODS:
            needed.add("model")
        if missing := needed - set(config):
            raise ValueError(f"speculative_config lacks {sorted(missing)}")
        return cls(**config)


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Sizes and modes of an engine.

    Attributes:
        max_model_len: most tokens a request may come to, prompt included.
        max_num_seqs: requests that run at the same time.
        max_num_batched_tokens: most prompt tokens of one step.
        page_size: tokens per page of the key-value pool.
        num_pages: pages of the pool.
        dtype: of weights and caches.
        kernels: implementation of the GPU operations.
        async_scheduling: plan and launch a step before reading the one before it.
        exact: run every step in one shape, so that results depend on nothing but the request.
        max_logprobs: most likeliest tokens that a request may ask for.
        logprobs_mode: "raw" reports the model's distribution, "processed" the one drawn from.
        seed: seed of the requests that bring none.
    """

    max_model_len: int
    max_num_seqs: int = 16
    max_num_batched_tokens: int = 512
    page_size: int = 16
    num_pages: int
    dtype: str = "float32"
    kernels: str = "auto"
    async_scheduling: bool = True
    exact: bool = False
    max_logprobs: int = 20
    logprobs_mode: str = "raw"
    seed: int = 0

    def __post_init__(self):
        check_positive(
            max_model_len=self.max_model_len,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            page_size=self.page_size,
            num_pages=self.num_pages,
        )
        _check_choice("dtype", self.dtype, DTYPES)
        _check_choice("kernels", self.kernels, KERNELS)
        _check_choice("logprobs_mode", self.logprobs_mode, LOGPROBS_MODES)
        is_count = isinstance(self.max_logprobs, Integral) and self.max_logprobs is not True
        if not is_count or self.max_logprobs < 0:
            raise ValueError(f"max_logprobs={self.max_logprobs!r} must be an integer of at least 0")
        if not isinstance(self.seed, Integral) or not 0 <= self.seed < 2**32:
            raise ValueError(f"seed={self.seed!r} must be in 0..{2**32 - 1}")
        if self.num_pages < self.pages_per_seq:
            raise ValueError(
                f"num_pages={self.num_pages} cannot hold one request of "
                f"max_model_len={self.max_model_len} ({self.pages_per_seq} pages of "
                f"{self.page_size} tokens); raise num_pages or lower max_model_len"
            )

    @property
    def pages_per_seq(self) -> int:
        """Width of the page table."""
        return -(-self.max_model_len // self.page_size)

    @property
    def decode_batches(self) -> tuple[int, ...]:
        """Batch sizes that decode steps are compiled for: powers of two up to max_num_seqs."""
        if self.exact:
            return (max(self.max_num_seqs, EXACT_BATCH),)
        return _doubling(1, self.max_num_seqs)

    @property
    def prefill_widths(self) -> tuple[int, ...]:
        """Chunk lengths that prefill steps are compiled for, doubling up to the budget."""
        most = min(self.max_num_batched_tokens, self.max_model_len)
        return _doubling(min(32, most), most)

    @property
    def prefill_shapes(self) -> tuple[tuple[int, int], ...]:
        """(batch, width) of the prefill steps: one prompt, or as many as the budget holds."""
        if self.exact:
            return ((1, min(EXACT_CHUNK, self.prefill_widths[-1])),)
        shapes = []
        for width in self.prefill_widths:
            most = min(self.max_num_batched_tokens // width, self.max_num_seqs)
            shapes += [(1, width)] + ([(most, width)] if most > 1 else [])
        return tuple(shapes)


def _doubling(first: int, last: int) -> tuple[int, ...]:
    sizes = [first]
    while sizes[-1] < last:
        sizes.append(min(2 * sizes[-1], last))
    return tuple(sizes)
