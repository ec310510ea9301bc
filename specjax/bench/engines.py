"""Opens two engines that share the target's weights: one with a drafter, and one without.

They are used to measure policies, which choose the number of drafts K in each round.
"""

import argparse
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

from specjax.bench.devices import Devices, set_policies, share_target
from specjax.bench.drafters import label, read_config
from specjax.bench.workload import make_requests, read_questions, tokenize
from specjax.checkpoint.demo import DRAFTERS
from specjax.checkpoint.hub import resolve
from specjax.checkpoint.tokenizer_files import check_tokenizer
from specjax.checks import check_positive, check_seed
from specjax.config import SpeculativeConfig
from specjax.engine.engine import Engine
from specjax.engine.metrics import Metrics
from specjax.host.request import Request
from specjax.host.speculation.policy import StaticPolicy
from specjax.llm import LLM
from specjax.sampling_params import SamplingParams
from specjax.serving.drafters import NamedDrafter, parse_drafter
from specjax.text.tokenizer import load_tokenizer

# Small chunks need few programs, and their slowness does not matter, as prefill is not timed.
_PROMPT_CHUNK, _MAX_PROMPT_TOKENS = 32, 512


@dataclass(frozen=True, kw_only=True)
class Setup:
    """The models, sizes and sampling of a measurement. The fields are options of the commands."""

    model: str
    drafter: Mapping[str, Any]  # the speculative config without K
    ks: tuple[int, ...]
    batch_sizes: tuple[int, ...]
    max_tokens: int
    max_model_len: int
    temperature: float
    seed: int
    rounds: int
    dtype: str
    quantization: str | None = None
    synthetic_rates: tuple[float, ...] | None = None  # accept drafts at these rates; None: verify
    devices: Devices = field(default_factory=Devices)

    def __post_init__(self):
        check_positive(**{"--rounds": self.rounds})
        for option, values, minimum in ("--k", self.ks, 0), ("--batch-size", self.batch_sizes, 1):
            if not values or min(values) < minimum:
                given = ",".join(map(str, values))
                raise ValueError(f"{option} {given} must list integers of at least {minimum}")
        if max(self.ks) < 1:
            raise ValueError("--k 0 alone drafts nothing; also list a K of at least 1")
        if self.max_tokens < 2:
            raise ValueError(
                f"--max-tokens {self.max_tokens} leaves nothing to time: the first token comes "
                "with the prompt; use at least 2"
            )
        check_seed(**{"--seed": self.seed})
        SamplingParams(temperature=self.temperature)
        SpeculativeConfig.of(self.speculative_config)

    @property
    def name(self) -> str:
        """The drafter's name in results."""
        return label(self.drafter)

    @property
    def speculative_config(self) -> dict[str, Any]:
        """The drafter's speculative config, with the largest of `ks` as its number of drafts."""
        config = {**self.drafter, "num_speculative_tokens": max(self.ks)}
        if self.synthetic_rates is not None:
            config |= {
                "verification": "synthetic",
                "synthetic_acceptance_rates": self.synthetic_rates,
            }
        return config

    def make_requests(self, batch_size: int) -> list[Request]:
        """Return `batch_size` requests for each replica. If there are too few prompts, they repeat.

        The requests ignore EOS, so that batches stay full.
        """
        count = batch_size * self.devices.data_parallel_size
        folder = resolve(self.model)
        check_tokenizer(folder)
        tokenizer = load_tokenizer(folder)
        assert tokenizer is not None
        prompts = tokenize(read_questions(), tokenizer)
        return make_requests(
            [prompts[i % len(prompts)] for i in range(count)],
            max_tokens=self.max_tokens,
            max_model_len=self.max_model_len,
            temperature=self.temperature,
            seed=self.seed,
            stop_ids=(),
        )


def read_setup(args: argparse.Namespace) -> Setup:
    """Return the setup that a command's options describe."""
    if args.speculative_config is None:
        drafter = read_drafter(args.model, args.drafter)._asdict()
    elif args.drafter is None:
        drafter = read_config(args.speculative_config, args.model)
    else:
        raise ValueError("--speculative-config names the drafter; leave out --drafter")
    return Setup(
        model=args.model,
        drafter=drafter,
        ks=read_integers("--k", args.k),
        batch_sizes=read_integers("--batch-size", args.batch_size),
        max_tokens=args.max_tokens,
        max_model_len=args.max_model_len,
        temperature=args.temperature,
        seed=args.seed,
        rounds=args.rounds,
        dtype=args.dtype,
        quantization=args.quantization,
        synthetic_rates=read_rates(args.synthetic_rates),
        devices=Devices.of(args),
    )


def read_rates(text: str | None) -> tuple[float, ...] | None:
    """Parse acceptance rates like 0.8,0.5. Return None if `text` is None."""
    if text is None:
        return None
    try:
        return tuple(float(rate) for rate in text.split(","))
    except ValueError as error:
        raise ValueError(f"--synthetic-rates {text} must list rates, like 0.8,0.5,0.3") from error


def read_drafter(model: str, given: str | None) -> NamedDrafter:
    """Return the method and the checkpoint of a drafter.

    `given` is the value of --drafter. If it is None, return the drafter of the demo model `model`.
    """
    if given is None:
        if model not in DRAFTERS:
            raise ValueError(f"--model {model} has no default drafter; name one with --drafter")
        drafters = DRAFTERS[model]
        method = "eagle3" if "eagle3" in drafters else next(iter(drafters))
        return NamedDrafter(method, drafters[method])
    return parse_drafter(given, target=model)


def read_integers(option: str, text: str) -> tuple[int, ...]:
    """Parse a list like 1,2,3. Return its numbers in ascending order, without duplicates."""
    try:
        return tuple(sorted({int(part) for part in text.split(",")}))
    except ValueError as error:
        raise ValueError(f"{option} {text} must list integers, like 1,2,3") from error


def step_budget(batch_size: int, max_drafts: int) -> int:
    """Return a token budget with which all requests can prefill or decode in the same step.

    In a step, a request has `max_drafts` + 1 rows in the target, and at most `max_drafts` rows in
    the drafter.
    """
    rows = 2 * max_drafts + 1
    return max(min(_PROMPT_CHUNK * batch_size, _MAX_PROMPT_TOKENS), rows * batch_size)


class Engines(NamedTuple):
    """Two LLMs with the same target: `drafting` has a drafter, and `plain` has none."""

    plain: LLM  # without a drafter
    drafting: LLM  # with a drafter


@contextmanager
def open_engines(setup: Setup, *, show_progress: bool) -> Iterator[Engines]:
    """Yield the two LLMs of a measurement, after compiling their steps for every K."""
    max_batch = max(setup.batch_sizes)
    sizes: dict[str, Any] = {
        "enable_prefix_caching": False,  # every run must do the same work
        "dtype": setup.dtype,
        "quantization": setup.quantization,
        "max_model_len": setup.max_model_len,
        "max_num_seqs": max_batch,
        "max_num_batched_tokens": step_budget(max_batch, max(setup.ks)),
        "compile_ahead": True,
        "verbose": show_progress,
        **asdict(setup.devices),
    }
    model = setup.model
    with (
        LLM(model, **sizes) as plain,
        LLM(model, speculative_config=setup.speculative_config, **sizes) as drafting,
    ):
        engine = drafting.engine
        share_target(engine, plain.engine)
        for k in setup.ks:
            set_policies(engine, partial(StaticPolicy, k), show_progress=show_progress)
        yield Engines(plain, drafting)


def warm_up(engine: Engine, requests: Sequence[Request], num_tokens: int = 8) -> None:
    """Generate up to `num_tokens` tokens per request untimed, to warm up memory and caches."""
    for request in requests:
        engine.add(replace(request, max_tokens=min(request.max_tokens, num_tokens)))
    while engine.has_work:
        engine.step()


def histograms(engine: Engine, before: Metrics) -> dict[str, dict[int, int]]:
    """Return histograms of the rounds since an earlier time. `before` has the metrics of that time.

    "k_histogram" has the number of rounds with each K. "request_k_histogram" has, for each number
    of drafts, how often a request had this number of drafts in a round.
    """
    now = engine.metrics()
    return {
        name: dict(sorted((Counter(getattr(now, name)) - Counter(getattr(before, name))).items()))
        for name in ("k_histogram", "request_k_histogram")
    }
