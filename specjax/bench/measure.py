"""Times configurations (a drafting method and K), which decode the same prompts in turn.

A round runs one batch of prompts under every configuration, back to back, so that other load on the
machine affects all of them equally. Only decoding is timed. It begins when every prompt of the
batch has its first token, and ends when the last output is complete.
"""

import time
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from typing import TypeAlias

from specjax.bench.devices import set_policies
from specjax.bench.sources import DraftsBySource
from specjax.engine.engine import Engine
from specjax.engine.metrics import Metrics
from specjax.host.request import Request
from specjax.host.speculation.policy import StaticPolicy

PLAIN = "plain"


@dataclass(frozen=True)
class Configuration:
    """A drafting method, and its number of drafts K per step. `PLAIN` has K = 0."""

    method: str
    k: int

    @property
    def name(self) -> str:
        """The name in reports."""
        return self.method if self.method == PLAIN else f"{self.method} K={self.k}"


PLAIN_ONE = Configuration(PLAIN, 0)


@dataclass(frozen=True, kw_only=True)
class Run:
    """The results of one batch of prompts under one configuration.

    Fields other than `outputs` exclude prefill. Steps are summed over replicas, which run at the
    same time. A replica that ends before the others adds one useless step: it launched this step
    before it read the result that ended its last request.
    """

    outputs: Mapping[Hashable, tuple[int, ...]]  # by request id
    seconds: float
    num_steps: int
    num_tokens: int
    num_request_steps: int  # steps, counted once per request that gained tokens
    num_accepted_per_pos: tuple[int, ...]
    num_replicas: int = 1
    sources: DraftsBySource = DraftsBySource({}, {}, {})

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of the whole batch."""
        return self.num_tokens / self.seconds

    @property
    def step_seconds(self) -> float:
        """Seconds of steps, summed over replicas."""
        return self.seconds * self.num_replicas

    @property
    def ms_per_step(self) -> float:
        """Mean milliseconds per step."""
        return 1e3 * self.step_seconds / self.num_steps

    @property
    def ms_per_token(self) -> float:
        """TPOT without prefill, in milliseconds, averaged over all tokens of all requests."""
        return self.ms_per_step * self.num_request_steps / self.num_tokens


Round: TypeAlias = Mapping[Configuration, Run]  # all runs decode the same batch of prompts


def decode(engine: Engine, requests: Sequence[Request]) -> Run:
    """Run `requests` together to completion on an idle engine."""
    outputs: dict[Hashable, tuple[int, ...]] = {}

    def step() -> None:
        for sequence in filter(lambda one: one.is_finished, engine.step()):
            outputs[sequence.request.request_id] = tuple(sequence.output)

    num_prompt_tokens = sum(len(request.prompt_token_ids) for request in requests)
    num_prompt_tokens += engine.metrics().num_prompt_tokens
    for request in requests:
        engine.add(request)
    while engine.metrics().num_prompt_tokens < num_prompt_tokens:
        step()
    before, start = engine.metrics(), time.perf_counter()
    while len(outputs) < len(requests):
        step()
    seconds, after = time.perf_counter() - start, engine.metrics()
    while engine.has_work:  # a step launched before the last result was read
        engine.step()
    return as_run(outputs, seconds, before, after, num_replicas=len(engine.engines))


def as_run(
    outputs: Mapping[Hashable, tuple[int, ...]],
    seconds: float,
    before: Metrics,
    after: Metrics,
    *,
    num_replicas: int = 1,
) -> Run:
    """Return an engine's results between two snapshots of its counters, `before` and `after`.

    The engine must not have run a prefill step between the two snapshots.
    """
    num_tokens = after.num_generation_tokens - before.num_generation_tokens
    accepted = tuple(
        now - then
        for now, then in zip_longest(
            after.num_accepted_tokens_per_pos, before.num_accepted_tokens_per_pos, fillvalue=0
        )
    )
    return Run(
        outputs=outputs,
        seconds=seconds,
        num_steps=after.num_decode_steps - before.num_decode_steps,
        num_tokens=num_tokens,
        num_request_steps=num_tokens - sum(accepted),  # each gives 1 token + accepted drafts
        num_accepted_per_pos=accepted,
        num_replicas=num_replicas,
        sources=DraftsBySource.between(before, after),
    )


def measure(
    engines: Mapping[str, Engine],
    configurations: Sequence[Configuration],
    batches: Iterable[Sequence[Request]],
) -> Iterator[Round]:
    """Run one round per batch of requests. Yield the runs of each round, by configuration.

    Each round begins with another configuration than the round before. `engines` holds the engine
    of each method.
    """
    for i, requests in enumerate(batches):
        first, runs = i % len(configurations), {}
        for configuration in [*configurations[first:], *configurations[:first]]:
            engine = engines[configuration.method]
            set_policies(engine, partial(StaticPolicy, configuration.k))
            runs[configuration] = decode(engine, requests)
        yield runs
