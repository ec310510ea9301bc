"""Random schedules, which depend only on a seed.

A schedule has an engine's sizes and options, requests (many with common prefixes), and the
probabilities of aborts, preemptions and device failures. The output of a request alone is computed
by a short function here.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from support.scripts import EMPTY, fold, mask_of, next_token

from specjax.config import EXACT_CHUNK, EngineConfig
from specjax.host.request import Request
from specjax.host.speculation.policy import PolicyRule
from specjax.host.speculation.rounds import DecodeLoad, Split, SplitShape, SplitWish
from specjax.host.windows import pages_in_use
from specjax.sampling_params import SamplingParams, StructuredOutputs

Rng = np.random.Generator


@dataclass
class AnyPolicy(PolicyRule):
    """A policy that chooses K at random. Often only some of the requests draft."""

    choices: tuple[int, ...]
    rng: Rng
    split: Split | None = None
    wish: SplitWish | None = None

    def choose(self, load: DecodeLoad) -> int:
        """Return a random K, regardless of the load."""
        k, n, self.split, self.wish = (
            int(self.rng.choice(self.choices)),
            load.num_sequences,
            None,
            None,
        )
        batches = sorted({batch for batch, _ in load.shapes})
        fitting = [batch for batch in batches if batch < n]
        if len(self.choices) == 1:  # see `is_undisturbed`
            return k
        if not k or load.splits is None or not fitting or chance(self.rng, 0.3):
            return k
        drafting = int(self.rng.choice(fitting))
        others = next(batch for batch in batches if batch >= n - drafting)
        shape = SplitShape(drafting, k, others)
        self.wish = SplitWish(shape, 1.0)
        if shape in load.splits or {(drafting, k), (others, 0)} <= set(load.shapes):
            self.split = Split(shape, self.rng.permutation(n)[:drafting].tolist())
        return k


@dataclass
class Watch:
    """A stop condition on an output's text: the output ends, or fails, at its `last` token."""

    last: int
    fails: bool
    stop_reason: str | None = None
    text: str = ""
    seen: list[int] = field(default_factory=list)

    def append(self, tokens: Iterable[int]) -> int | None:
        """See `TextWatch.append`."""
        self.seen += tokens
        if len(self.seen) != self.last:
            return None
        if self.fails:
            raise RuntimeError("a text that cannot be read")
        self.stop_reason = "text"
        return 1


@dataclass
class Grammar:
    """A grammar of an output. The output is complete, or no longer valid, at its `last` token."""

    last: int
    fails: bool
    num_words: int
    fails_late: bool = False  # it fails when a mask is computed, which may never happen
    seen: list[int] = field(default_factory=list)
    is_finished: bool = False
    has_failed_late: bool = False

    def accept(self, tokens: Iterable[int]) -> None:
        """See `Matcher.accept`."""
        self.seen += tokens
        if len(self.seen) == self.last and self.fails:
            raise ValueError("a token that the grammar does not permit")
        self.is_finished = len(self.seen) >= self.last and not self.fails_late

    def masks(self, drafts: list[int]) -> np.ndarray:
        """Return masks that differ for every history, so that a wrong mask is found."""
        if self.fails_late and len(self.seen) >= self.last:
            self.has_failed_late = True
            raise ValueError("a grammar that has come to nothing")
        digest = fold(EMPTY, self.seen)
        words = [mask_of(fold(digest, drafts[:i])) for i in range(len(drafts) + 1)]
        return np.array([[word] * self.num_words for word in words], np.int32)


class Expected(NamedTuple):
    """The output of a sample that is not aborted."""

    tokens: list[int]
    reason: str


@dataclass(frozen=True)
class Arrival:
    """A request, the step in which it arrives, and the expected output of each sample."""

    step: int
    request: Request
    expected: list[Expected]


@dataclass(frozen=True)
class Schedule:
    """The sizes and options of an engine, its requests, and the events from outside."""

    seed: int
    config: EngineConfig
    choices: tuple[int, ...]
    draft_slots: int
    is_recurrent: bool
    drafts_fewer: bool
    vocab_size: int
    arrivals: list[Arrival]
    disturbances: dict[str, float]  # how likely each is before a step
    windows: tuple[int, ...]  # of layers of the target
    may_defer: bool  # whether the drafter may observe rounds without drafts later
    has_texts: bool  # whether drafts also come from texts

    @property
    def is_undisturbed(self) -> bool:
        """Whether K is constant, no texts are searched, and only ids and limits end outputs."""
        requests = [arrival.request for arrival in self.arrivals]
        host_ends = any(r.watch_text or r.follow_grammar for r in requests)
        is_static = len(self.choices) == 1 and not self.has_texts
        return is_static and not host_ends and not self.disturbances

    @property
    def num_tokens(self) -> int:
        """The maximum number of tokens of all samples, including prompts."""
        return sum(a.request.max_length * len(a.request.seeds) for a in self.arrivals)

    def __str__(self) -> str:
        sizes = replace(self, arrivals=[])
        lines = [
            f"step {a.step}: request {a.request.request_id}, "
            f"{len(a.request.prompt_token_ids)} tokens, max_tokens={a.request.max_tokens}, "
            + ", ".join(f"{len(e.tokens)} {e.reason}" for e in a.expected)
            for a in self.arrivals
        ]
        return "\n".join([repr(sizes), *lines])


def run_alone(request: Request, seed: int, vocab_size: int) -> Expected:
    """Return the output of a sample as if it ran alone, computed without an engine."""
    digest, tokens = fold(EMPTY, request.prompt_token_ids), []
    text = grammar = {}  # whether the output fails, by the number of its last token
    if request.watch_text:
        text = {(watch := request.watch_text()).last: watch.fails}
    if request.follow_grammar and not (matcher := request.follow_grammar()).fails_late:
        grammar = {matcher.last: matcher.fails}
    while len(tokens) < request.max_tokens:
        tokens.append(next_token(digest, seed, vocab_size))
        digest = fold(digest, tokens[-1:])
        is_stop = tokens[-1] in request.stop_ids  # and then not part of the text
        lasts = grammar if is_stop else text | grammar
        if lasts.get(len(tokens)):
            return Expected(tokens, "error")
        if is_stop or len(tokens) in lasts:
            return Expected(tokens, "stop")
    return Expected(tokens, "length")


def make_schedule(seed: int) -> Schedule:
    """Return the schedule of a seed."""
    rng = np.random.default_rng(seed)
    is_recurrent = chance(rng, 0.45)
    choices = (int(rng.integers(0, 6)),)
    if chance(rng, 0.5):
        choices = tuple(sorted({int(k) for k in rng.integers(0, 6, 3)}))
    draft_slots = int(rng.integers(0, 4)) * chance(rng, 0.5)
    config = make_config(rng, max(choices) + 1, draft_slots, is_recurrent)
    vocab_size = int(rng.choice([2, 3, 8, 40]))
    likely = {"abort": 0.05, "preempt": 0.1, "clear": 0.02, "fail": 0.05, "reset": 0.01}
    disturbances = {}
    if chance(rng, 0.6):
        disturbances = {name: p for name, p in likely.items() if chance(rng, 0.4)}
    arrivals = make_arrivals(rng, config, vocab_size, "fail" in disturbances)
    windows = make_windows(rng, config)
    if windows and chance(rng, 0.3):  # pages of windows may run out first
        one = max(pages_in_use(config, window, max(choices), 1) for window in windows)
        config = replace(config, max_window_pages=one + int(rng.integers(3)))
    return Schedule(
        seed,
        config,
        choices,
        draft_slots,
        is_recurrent=is_recurrent,
        drafts_fewer=chance(rng, 0.2),
        vocab_size=vocab_size,
        arrivals=arrivals,
        disturbances=disturbances,
        windows=windows,
        may_defer=chance(rng, 0.7),
        has_texts=max(choices) > 0 and chance(rng, 0.5),
    )


def make_config(rng: Rng, least: int, draft_slots: int, is_recurrent: bool) -> EngineConfig:
    """Return a config whose token budget has room for rounds of `least` tokens, often barely."""
    max_model_len = int(rng.integers(2, 80))
    page_size = int(rng.integers(1, 17 if chance(rng, 0.5) else 5))
    pages_per_seq = -(-max_model_len // page_size)
    max_num_seqs = int(rng.integers(1, 9))
    num_pages = pages_per_seq + int(rng.integers(0, 4))
    if chance(rng, 0.4):
        num_pages = int(rng.integers(pages_per_seq, pages_per_seq * (max_num_seqs + 1) + 1))
    exact = chance(rng, 0.2)
    if exact:
        least = max(least, min(EXACT_CHUNK, max_model_len))
    scheduled = least + int(rng.integers(0, rng.choice([8, 40, 160])))
    batched = scheduled + draft_slots + int(rng.integers(0, 40)) * chance(rng, 0.5)
    return EngineConfig(
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=batched,
        max_num_scheduled_tokens=scheduled,
        page_size=page_size,
        num_pages=num_pages,
        enable_prefix_caching=chance(rng, 0.8),
        num_snapshots=int(rng.integers(0, 4)) if is_recurrent else None,
        scheduling_policy="priority" if chance(rng, 0.3) else "fcfs",
        async_scheduling=chance(rng, 0.75),
        compile_ahead=chance(rng, 0.5),
        exact=exact,
        max_logprobs=0,
    )


def make_windows(rng: Rng, config: EngineConfig) -> tuple[int, ...]:
    """Return the sizes of up to two attention windows. Many are much shorter than requests."""
    most = max(1, config.max_model_len // int(rng.choice([1, 4, 10])))
    return tuple({int(window) for window in rng.integers(1, most + 1, int(rng.integers(0, 3)))})


def make_arrivals(rng: Rng, config: EngineConfig, vocab_size: int, fails: bool) -> list[Arrival]:
    """Return requests in the order of arrival. Many prompts have a common prefix."""
    arrivals: list[Arrival] = []
    step, gap = 0, float(rng.choice([0, 1, 1, 5]))
    families = [rng.integers(0, vocab_size, config.max_model_len).tolist() for _ in range(2)]
    for number in range(int(rng.integers(1, 11))):
        prompt = make_prompt(rng, config, vocab_size, families, arrivals)
        request = make_request(rng, config, vocab_size, number, prompt, fails)
        if arrivals and chance(rng, 0.3):  # the same draws, so that outputs are shared as well
            seeds = rng.permutation(arrivals[-1].request.seeds)[: len(request.seeds)]
            others = request.seeds[len(seeds) :]
            request = replace(request, seeds=(*map(int, seeds), *others))
        expected = [run_alone(request, seed, vocab_size) for seed in request.seeds]
        arrivals.append(Arrival(step, request, expected))
        step += int(rng.poisson(gap))
    return arrivals


def make_prompt(rng, config, vocab_size, families, arrivals: list[Arrival]) -> list[int]:
    """Return a prompt that is new, or begins like another prompt or a prompt with its output."""
    most = config.max_model_len - 1
    # If there are few pages, several short prompts are admitted, and outputs run out of pages.
    is_tight = config.num_pages < 2 * config.pages_per_seq
    part = rng.choice([1, 4, 8] if is_tight else [1, 1, 4])
    length = int(rng.integers(0, max(most // part, 1))) + 1
    fresh = rng.integers(0, vocab_size, length).tolist()
    how = rng.choice(["fresh", "family", "branch", "longer", "same", "same"])
    if how == "fresh" or (how != "family" and not arrivals):
        return fresh
    if how == "family":
        shared = families[rng.integers(len(families))][: rng.integers(1, length + 1)]
        return [*shared, *fresh][:length]
    earlier = arrivals[rng.integers(len(arrivals))]
    known = list(earlier.request.prompt_token_ids)
    if how == "longer":
        known += earlier.expected[0].tokens
        known += fresh[: rng.integers(0, 4)]
    if how == "branch":  # often at the end of a page
        size = config.page_size if chance(rng, 0.5) else 1
        known = known[: int(rng.integers(0, len(known) + 1)) // size * size] + fresh
    return known[:most]


def make_request(rng, config, vocab_size, number, prompt: list[int], fails: bool) -> Request:
    """Return a request that continues `prompt`, with random options."""
    room = config.max_model_len - len(prompt)
    max_tokens = room if chance(rng, 0.5) else int(rng.integers(1, room + 1))
    count = int(rng.integers(2, 5)) if chance(rng, 0.25) else 1
    last, ends_badly = int(rng.integers(1, max_tokens + 1)), chance(rng, 0.3)
    watch = grammar = structured = None
    if chance(rng, 0.15):
        watch = partial(Watch, last, ends_badly)
    elif chance(rng, 0.1):
        fails_late = not ends_badly and chance(rng, 0.3)
        grammar = partial(Grammar, last, ends_badly, -(-vocab_size // 32), fails_late)
        structured = StructuredOutputs(choice=["a"])
    wants_prompt = chance(rng, 0.1) and not config.exact
    has_processor = fails and chance(rng, 0.5) and not config.exact
    params = SamplingParams(
        n=count,
        logprobs=0 if chance(rng, 0.2) else None,
        prompt_logprobs=0 if wants_prompt else None,
        structured_outputs=structured,
        logits_processors=[unchanged] if has_processor else (),
    )
    num_stops = int(rng.integers(1, 3)) * chance(rng, 0.3)
    return Request(
        number,
        tuple(prompt),
        params,
        max_tokens,
        tuple(rng.integers(0, 2**32, count).tolist()),
        tuple(set(rng.integers(0, vocab_size, num_stops).tolist())),
        processor=0 if params.logits_processors else -1,
        watch_text=watch,
        follow_grammar=grammar,
        priority=int(rng.integers(-1, 2)) if config.scheduling_policy == "priority" else 0,
    )


def chance(rng: Rng, probability: float) -> bool:
    """Return true with this probability."""
    return bool(rng.random() < probability)


def unchanged(tokens: Any, length: Any, logits: Any) -> Any:
    """Return the logits unchanged, as a logits processor."""
    return logits
