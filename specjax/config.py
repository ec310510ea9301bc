"""Frozen configuration. Every value is checked once, before any work starts."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from os import PathLike
from typing import Any

from pallas_kernels import KERNELS
from pallas_kernels.page_formats import PAGE_FORMATS, PageFormat
from specjax.checkpoint.quantised.bits import BITS
from specjax.checks import (
    check_choice,
    check_count,
    check_flags,
    check_positive,
    check_seed,
    is_number,
    parse_batches,
    parse_shapes,
    parse_table,
    warn,
)
from specjax.methods import METHODS, OWN_METHODS, check_sources
from specjax.vllm_names import take_speculation

DTYPES = ("float32", "bfloat16")
AUX_ID_CONVENTIONS = ("entering", "output")
DRAFT_SAMPLE_METHODS = ("probabilistic", "greedy")
VERIFICATIONS = ("seed_exact", "rejection", "block", "synthetic")
LOGPROBS_MODES = ("raw", "processed", "both")
COLLECTIVES = ("auto", "nccl", "graph")
KV_CACHE_DTYPES = ("auto", *PAGE_FORMATS)
HEAD_DTYPES = ("fp8", "int8")
SCHEDULING_POLICIES = ("fcfs", "priority")
# The one shape of exact mode, of any engine: requests, rows per request, and tokens of a chunk.
EXACT_BATCH, EXACT_WIDTH, EXACT_CHUNK = 16, 8, 32
ADAPTIVE_DRAFTS = 5  # default maximum of K with `adaptive`
MANY_DRAFTS, MAX_DRAFTS = 16, 64  # maximum of K without a warning, without an error


@dataclass(frozen=True, kw_only=True)
class SpeculativeConfig:
    """The drafting method, its number of drafts, and their verification.

    Attributes:
        method: "eagle" (EAGLE-1), "eagle3", "mtp" (the target's own module), "dflash" or "p_eagle"
            (all drafts in one pass), "draft_model" (a smaller model), "medusa" (a head for every
            draft), "ngram" (the tokens after the last earlier occurrence of the latest tokens), or
            "suffix" (the most frequent next tokens in the request's text, earlier outputs and
            corpora).
        model: the drafter's checkpoint, a folder or hub id; None for "ngram" and "suffix", and if
            "mtp" comes with the target's checkpoint.
        sources: further sources of drafts: () or ["suffix"]. In a mapping, the key may be "with".
            In a step, a request uses the source from which most accepted drafts are expected.
        num_speculative_tokens: K, the number of drafts per step, at most 64; the maximum if K
            varies. Optional with `adaptive` (default 5) and with `dynamic_config_path` (default:
            the profile's maximum).
        num_speculative_tokens_per_batch_size: K by the number of requests that decode together, as
            a table [[lo, hi, K], ...]; sizes without an entry have the K of the entry before them.
        dynamic_config_path: a profile that `specjax profile` or `LLM.save_dynamic_config` wrote; K
            is chosen from its times and rates. With `adaptive`, learning begins from it.
        dynamic_config_force: use the profile even if it was measured on another model.
        adaptive: choose K from times and acceptance rates measured while serving.
        max_slowdown: maximum fraction by which drafts may slow down the requests in one range of
            context lengths; 1 for no limit. It needs `adaptive` or a profile.
        verification: "seed_exact" emits the same tokens as decoding without drafts; "rejection" and
            "block" emit the same distribution, and accept more of "probabilistic" drafts;
            "synthetic" accepts drafts at given rates, to measure speed.
        synthetic_acceptance_rates: fractions of steps that accept at least 1, 2, ... drafts; one
            rate per draft, none above the rate before it.
        synthetic_acceptance_length: mean acceptance length in 1..K+1, instead of rates.
        draft_sample_method: above temperature 0, "probabilistic" drafts are drawn (with the
            target's noise under seed_exact), and "greedy" drafts are the argmax.
        aux_id_convention: which hidden state the number i in an EAGLE-3 config means: the input of
            layer i ("entering", as in vLLM) or its output ("output", as in SGLang). i is 0-based.
        prompt_lookup_min, prompt_lookup_max: shortest and longest match of "ngram", in tokens; by
            default 2 and 5, at most 64.
        suffix_decoding_...: as in vLLM, in the order of the fields: longest match, in tokens;
            number of earlier outputs kept; drafts per matched token; least probability that all
            drafts are accepted.
        kv_cache_dtype: dtype of the drafter's pages, see `LLM`; None for the target's.
        head_dtype: "fp8" or "int8" quantises the output head that drafts come from. If this is the
            target's head, the drafter gets a copy, and the target keeps its own.
        quantization: "fp8", "int8" or "int4" quantises the drafter's other layers, see `LLM`.
    """

    method: str
    # Resolved below. If a profile determines it, it is None until the profile is read.
    num_speculative_tokens: int = None  # pyright: ignore[reportAssignmentType]
    model: str | None = None
    verification: str = "seed_exact"
    synthetic_acceptance_rates: Sequence[float] | None = None
    synthetic_acceptance_length: float | None = None
    draft_sample_method: str = "probabilistic"
    aux_id_convention: str = "entering"
    prompt_lookup_min: int | None = None
    prompt_lookup_max: int | None = None
    sources: Sequence[str] = ()
    suffix_decoding_max_tree_depth: int = 24
    suffix_decoding_max_cached_requests: int = 10_000
    suffix_decoding_max_spec_factor: float = 1.0
    suffix_decoding_min_token_prob: float = 0.1
    num_speculative_tokens_per_batch_size: Sequence[tuple[int, int, int]] | None = None
    dynamic_config_path: str | PathLike[str] | None = None
    dynamic_config_force: bool = False
    adaptive: bool = False
    max_slowdown: float = 0.0
    kv_cache_dtype: str | None = None
    head_dtype: str | None = None
    quantization: str | None = None

    def __post_init__(self):
        where = "speculative_config"
        check_choice(f"{where}.method", self.method, tuple(METHODS))
        for name, value in check_sources(self).items():
            object.__setattr__(self, name, value)
        is_own = self.model is None and self.method in OWN_METHODS
        if not is_own and not isinstance(self.model, str | PathLike):
            raise ValueError(f"{where}.model={self.model!r} must be a folder or hub id")
        check_choice(f"{where}.draft_sample_method", self.draft_sample_method, DRAFT_SAMPLE_METHODS)
        check_choice(f"{where}.aux_id_convention", self.aux_id_convention, AUX_ID_CONVENTIONS)
        self._check_dtypes()
        self._check_dynamic()
        self._check_num_drafts()
        check_choice(f"{where}.verification", self.verification, VERIFICATIONS)
        self._check_synthetic()

    def _check_dtypes(self) -> None:
        choices = {"head_dtype": HEAD_DTYPES, "quantization": tuple(BITS)}
        for name, allowed in {"kv_cache_dtype": KV_CACHE_DTYPES, **choices}.items():
            where, value = f"speculative_config.{name}", getattr(self, name)
            if value is None:
                continue
            check_choice(where, value, allowed)
            if not METHODS[self.method].has_weights:
                what = "weights" if name in choices else "pages"
                raise ValueError(f"{where}={value!r}: {self.method!r} has no {what}; leave it out")

    @property
    def all_sources(self) -> tuple[str, ...]:
        """The names of all sources of drafts on the host: the method's own, and `sources`."""
        return *METHODS[self.method].sources, *self.sources

    def _check_dynamic(self) -> None:
        where, path = "speculative_config", self.dynamic_config_path
        flags = {"adaptive": self.adaptive, "dynamic_config_force": self.dynamic_config_force}
        check_flags(**{f"{where}.{name}": value for name, value in flags.items()})
        if not isinstance(path, str | PathLike | None) or path == "":
            raise ValueError(f"{where}.dynamic_config_path={path!r} must be a profile's path")
        if self.dynamic_config_force and path is None:
            raise ValueError(
                f"{where}.dynamic_config_force=True goes with dynamic_config_path; name the "
                "profile, or leave it out"
            )
        others = {"dynamic_config_path": path is not None, "adaptive": self.adaptive}
        given = [name for name, is_given in others.items() if is_given]
        slow = self.max_slowdown
        if not is_number(slow) or not 0 <= slow <= 1:
            raise ValueError(f"{where}.max_slowdown={slow!r} must be a fraction in 0..1")
        if slow and not given:
            raise ValueError(
                f"{where}.max_slowdown={slow} needs adaptive=True or a profile; add it"
            )
        if given and self.num_speculative_tokens_per_batch_size is not None:
            given = ["num_speculative_tokens_per_batch_size", *given]
            raise ValueError(f"{where} lets {' and '.join(given)} choose K; keep one of them")

    def _check_num_drafts(self) -> None:
        is_open = self.num_speculative_tokens is None and self.dynamic_config_path is None
        if is_open and self.adaptive:
            object.__setattr__(self, "num_speculative_tokens", ADAPTIVE_DRAFTS)
        k, table = self.num_speculative_tokens, self.num_speculative_tokens_per_batch_size
        if k is not None or self.dynamic_config_path is None:
            check_positive(**{"speculative_config.num_speculative_tokens": k})
        if k is not None and k > MANY_DRAFTS:
            said = f"speculative_config.num_speculative_tokens={k}"
            why = "every draft is compiled into every step, and few are accepted past the tenth"
            if k > MAX_DRAFTS:
                raise ValueError(f"{said} exceeds {MAX_DRAFTS}: {why}; lower it")
            warn(f"{said}: {why}; 3 to 7 are usual")
        if table is not None:
            parsed = parse_table(table, k)
            object.__setattr__(self, "num_speculative_tokens_per_batch_size", parsed)

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
        if k is None:
            raise ValueError(
                "verification='synthetic' needs speculative_config.num_speculative_tokens, the "
                "number of rates; set it next to dynamic_config_path"
            )
        if (rates is None) == (length is None):
            raise ValueError(f"verification='synthetic' needs {where}_rates or {where}_length")
        if rates is not None:
            listed = list(rates) if isinstance(rates, Iterable) else []
            is_rates = len(listed) == k and all(map(is_number, listed))
            if not is_rates or not all(0 <= b <= a for a, b in pairwise([1.0, *listed])):
                raise ValueError(
                    f"{where}_rates={rates!r} must be {k} rates in [0, 1], one per draft, none "
                    "above the previous one: fractions of steps that accept 1, 2, ... drafts"
                )
            object.__setattr__(self, "synthetic_acceptance_rates", tuple(map(float, listed)))
        if length is not None:
            if not is_number(length) or not 1 <= length <= k + 1:
                raise ValueError(f"{where}_length={length!r} must be in 1..{k + 1}, tokens")
            object.__setattr__(self, "synthetic_acceptance_length", float(length))

    @property
    def synthetic_rates(self) -> tuple[float, ...]:
        """The acceptance rate of each draft. A mean length of 2.5 gives 1, 0.5, 0, 0, ..."""
        if self.synthetic_acceptance_rates is not None:
            return tuple(self.synthetic_acceptance_rates)
        drafts = (self.synthetic_acceptance_length or 1) - 1
        return tuple(min(max(drafts - i, 0.0), 1.0) for i in range(self.num_speculative_tokens))

    @classmethod
    def of(cls, config: "SpeculativeConfig | Mapping[str, Any]") -> "SpeculativeConfig":
        """Build a config from a mapping. Errors name unknown and missing keys."""
        if isinstance(config, SpeculativeConfig):
            return config
        if not isinstance(config, Mapping):
            raise ValueError(
                f"speculative_config={config!r} must be a SpeculativeConfig or a mapping of its "
                "fields"
            )
        config = dict(take_speculation(config, [*(f.name for f in fields(cls)), "with"]))
        if "with" in config and "sources" in config:
            raise ValueError(
                "speculative_config has with and sources, which are one; leave one out"
            )
        if "with" in config:
            config["sources"] = config.pop("with")
        needed, method = {"method"}, config.get("method")
        if method is not None:
            check_choice("speculative_config.method", method, tuple(METHODS))
        if config.get("dynamic_config_path") is None and config.get("adaptive", False) is False:
            needed.add("num_speculative_tokens")
        if method not in OWN_METHODS:
            needed.add("model")
        if missing := needed - set(config):
            raise ValueError(f"speculative_config lacks {sorted(missing)}; add what is missing")
        return cls(**config)


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Sizes and modes of an engine.

    Attributes:
        max_model_len: maximum number of tokens of a request, including the prompt.
        max_num_seqs: maximum number of samples (n per request) that run at the same time.
        max_num_batched_tokens: maximum number of tokens per step, with drafters' extra tokens.
        max_num_scheduled_tokens: maximum number of tokens per step without these extra tokens; None
            for max_num_batched_tokens.
        decode_batches: batch sizes that rounds are compiled for; None for powers of two up to
            max_num_seqs. The largest size must be at least max_num_seqs, and at most 16 times it.
        prefill_shapes: pairs (batch, width) that prefill steps are compiled for; None for widths
            that double up to the token budget, each for 1, 4, 16, ... prompts. The largest must
            hold max_num_batched_tokens tokens, or max_num_seqs requests of maximum length.
        page_size: tokens per page of the KV cache.
        num_pages: number of pages for layers without a window, and the maximum for other layers.
        max_window_pages: maximum number of pages per window size; None for as many as are needed.
        enable_prefix_caching: keep pages for later requests with the same prefix.
        num_snapshots: number of recurrent states kept for prefix caching; None for a quarter of
            max_num_seqs.
        scheduling_policy: "fcfs" (first come, first served), or "priority" (lowest value first).
        dtype: dtype of weights, and of all caches except 8-bit pages.
        page_format, draft_page_format: formats of the target's and the drafter's 8-bit pages.
        kernels: implementation of the GPU operations.
        collectives: how several GPUs exchange sums: "auto" (XLA's choice), "nccl" (the library), or
            "graph" (NCCL inside of CUDA graphs). See `collective_options`.
        async_scheduling: plan and launch a step before reading the previous step's results.
        compile_ahead: compile every shape before the first request instead of in the background.
        exact: run all steps in fixed shapes, so that results depend only on the request.
        max_logprobs: maximum number of likeliest tokens that a request may ask for.
        logprobs_mode: "raw" reports the model's distribution, "processed" the distribution that
            tokens are drawn from. "both" reports "processed", and adds "raw" for the token itself.
        seed: seed of requests without a seed, any integer of 64 bits.
    """

    max_model_len: int
    max_num_seqs: int = 16
    max_num_batched_tokens: int = 512
    max_num_scheduled_tokens: int = None  # pyright: ignore[reportAssignmentType]  # resolved below
    decode_batches: tuple[int, ...] = None  # pyright: ignore[reportAssignmentType]  # likewise
    prefill_shapes: tuple[tuple[int, int], ...] = None  # pyright: ignore[reportAssignmentType]
    page_size: int = 16
    num_pages: int
    max_window_pages: int | None = None
    enable_prefix_caching: bool = True
    num_snapshots: int = None  # pyright: ignore[reportAssignmentType]  # resolved below
    scheduling_policy: str = "fcfs"
    dtype: str = "float32"
    page_format: PageFormat | None = None
    draft_page_format: PageFormat | None = None
    kernels: str = "auto"
    collectives: str = "auto"
    async_scheduling: bool = True
    compile_ahead: bool = False
    exact: bool = False
    max_logprobs: int = 20
    logprobs_mode: str = "raw"
    seed: int = 0

    def __post_init__(self):
        if self.max_num_scheduled_tokens is None:
            object.__setattr__(self, "max_num_scheduled_tokens", self.max_num_batched_tokens)
        check_positive(
            max_model_len=self.max_model_len,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_num_scheduled_tokens=self.max_num_scheduled_tokens,
            page_size=self.page_size,
            num_pages=self.num_pages,
        )
        if self.max_num_scheduled_tokens > self.max_num_batched_tokens:
            raise ValueError(
                f"max_num_scheduled_tokens={self.max_num_scheduled_tokens} exceeds "
                f"max_num_batched_tokens={self.max_num_batched_tokens}, which includes them; "
                f"lower it, or raise max_num_batched_tokens by "
                f"{self.max_num_scheduled_tokens - self.max_num_batched_tokens}"
            )
        if self.num_snapshots is None:
            object.__setattr__(self, "num_snapshots", max(1, self.max_num_seqs // 4))
        check_choice("scheduling_policy", self.scheduling_policy, SCHEDULING_POLICIES)
        check_choice("dtype", self.dtype, DTYPES)
        check_choice("kernels", self.kernels, KERNELS)
        check_choice("collectives", self.collectives, COLLECTIVES)
        check_choice("logprobs_mode", self.logprobs_mode, LOGPROBS_MODES)
        check_flags(
            enable_prefix_caching=self.enable_prefix_caching,
            async_scheduling=self.async_scheduling,
            compile_ahead=self.compile_ahead,
            exact=self.exact,
        )
        check_count(num_snapshots=self.num_snapshots, max_logprobs=self.max_logprobs)
        check_seed(seed=self.seed)
        if self.num_pages < self.pages_per_seq:
            raise ValueError(
                f"num_pages={self.num_pages} cannot hold one request of "
                f"max_model_len={self.max_model_len} ({self.pages_per_seq} pages of "
                f"{self.page_size} tokens); raise num_pages or lower max_model_len"
            )
        self._set_shapes()

    def _set_shapes(self) -> None:
        """Sort `decode_batches` and `prefill_shapes`, or set them to defaults if they are None."""
        usual = self._usual_batches(), self._usual_shapes()
        batches = usual[0] if self.decode_batches is None else self._checked_batches()
        shapes = usual[1] if self.prefill_shapes is None else self._checked_shapes()
        if self.exact and (batches, shapes) != usual:
            raise ValueError(
                f"decode_batches={batches} and prefill_shapes={shapes}: exact=True runs every step "
                "in a fixed shape; leave them out"
            )
        object.__setattr__(self, "decode_batches", batches)
        object.__setattr__(self, "prefill_shapes", shapes)

    def check_budgets(self, max_drafts: int, draft_slots: int) -> None:
        """Refuse token budgets that are too small for one request's round or chunk of a prompt.

        `draft_slots` is the number of extra tokens that the drafter runs per request.

        Raises:
            ValueError: a budget is too small; the message says by how much to raise it.
        """
        chunk = self.prefill_shapes[0][1] if self.exact else 1
        largest = max(max_drafts + 1, chunk)
        what = f"a round of {max_drafts} drafts and a token" if largest > chunk else "a chunk"
        with_slots = f"{what} with {draft_slots} draft slots"
        for name, needed, why in (
            ("max_num_scheduled_tokens", largest, what),
            ("max_num_batched_tokens", largest + draft_slots, with_slots),
        ):
            if (given := getattr(self, name)) < needed:
                or_lower = ", or lower num_speculative_tokens" if largest > chunk else ""
                raise ValueError(
                    f"{name}={given} cannot hold {why} ({needed} tokens), so nothing could be "
                    f"scheduled; raise {name} by {needed - given}{or_lower}"
                )

    @property
    def pages_per_seq(self) -> int:
        """The number of pages of a request of maximum length: the width of the page table."""
        return -(-self.max_model_len // self.page_size)

    def _usual_batches(self) -> tuple[int, ...]:
        """Return max_num_seqs and the powers of two below it. In exact mode, return one size."""
        if self.exact:
            return (max(self.max_num_seqs, EXACT_BATCH),)
        return growing(1, self.max_num_seqs, 2)

    def _usual_shapes(self) -> tuple[tuple[int, int], ...]:
        """Return pairs (batch, width) for prefill. Widths double up to the token budget.

        Batch sizes grow by a factor of 4, so that less than three quarters of the rows of a batch
        are padding. In exact mode, there is one shape.
        """
        widest = min(self.max_num_batched_tokens, self.max_model_len)
        widths = growing(min(32, widest), widest, 2)
        if self.exact:
            return ((1, min(EXACT_CHUNK, widths[-1])),)
        shapes = []
        for width in widths:
            max_batch = min(self.max_num_batched_tokens // width, self.max_num_seqs)
            shapes += [(batch, width) for batch in growing(1, max_batch, 4)]
        return tuple(shapes)

    def _checked_batches(self) -> tuple[int, ...]:
        sizes = parse_batches(self.decode_batches, self.max_num_seqs)
        if sizes[-1] < self.max_num_seqs:
            raise ValueError(
                f"decode_batches={self.decode_batches!r} holds no round of "
                f"max_num_seqs={self.max_num_seqs} requests; add {self.max_num_seqs}, or lower "
                f"max_num_seqs to {sizes[-1]}"
            )
        return sizes

    def _checked_shapes(self) -> tuple[tuple[int, int], ...]:
        given = self.prefill_shapes
        # No step has more prompt tokens than the budget, or than all of its requests together.
        possible = min(self.max_num_batched_tokens, self.max_num_seqs * self.max_model_len)
        ordered = parse_shapes(given, possible)
        largest = max(batch * width for batch, width in ordered)
        if largest < possible and ordered != self._usual_shapes():
            width = ordered[-1][1]
            raise ValueError(
                f"prefill_shapes={given!r} hold {largest} tokens of the {possible} that a step may "
                f"have by max_num_batched_tokens={self.max_num_batched_tokens}; add "
                f"({-(-possible // width)}, {width}), or lower max_num_batched_tokens to {largest}"
            )
        return ordered


def growing(first: int, last: int, factor: int) -> tuple[int, ...]:
    """Return sizes from `first` to `last`, each at most `factor` times the size before it."""
    sizes = [first]
    while sizes[-1] < last:
        sizes.append(min(factor * sizes[-1], last))
    return tuple(sizes)
