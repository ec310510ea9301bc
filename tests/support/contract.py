"""Runs the same schedule of requests on a real or a simulated device, and reports what happened.

Requests are greedy, and drafts come from prompt lookup. So all outputs can be computed in advance:
next tokens by transformers, and drafts by a search through lists. With these, a simulated device
can reproduce the report of a real device.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np
from support.engines import K
from support.schedules import AnyPolicy, chance
from support.scripts import Next

from specjax import LLM, SamplingParams
from specjax.device.models.model import is_recurrent, page_windows
from specjax.engine.metrics import Recorder
from specjax.host.request import Request
from specjax.host.scheduler import Scheduler
from specjax.host.sequence import Sequence as Sample

KS = (0, K)
MAX_OUTPUT = 40
# Metrics that depend on the clock, or on earlier compilations.
NOT_COMPARED = {"num_compilations", "compile_seconds", "host_ms", "wait_ms", "host_gap_ms"}


@dataclass
class PromptLookup:
    """A `Script` with transformers' greedy tokens, and drafts by n-gram lookup."""

    hf: Any
    shortest: int = 2
    longest: int = 5
    _known: dict[tuple[int, ...], int] = field(default_factory=dict)

    def following(self, tokens: list[int], digest: int, seed: int) -> int:
        """See `Script`."""
        import torch

        key = tuple(tokens)
        if key not in self._known:
            with torch.no_grad():
                logits = self.hf(torch.tensor([tokens])).logits[0, -1]
            self._known[key] = int(logits.argmax())
        return self._known[key]

    def draft(self, slot: Any, follow: Next, k: int, most: int) -> tuple[list[int], int]:
        """See `Script`."""
        found = self._search(slot.tokens, k)
        return ([0] * k, 0) if found is None else (found, most)

    def mask(self, tokens: Sequence[int]) -> int:
        """See `Script`. Not implemented, because these requests have no grammars."""
        raise NotImplementedError

    def _search(self, known: list[int], k: int) -> list[int] | None:
        """Return the k tokens after the last earlier occurrence of the longest repeated suffix."""
        for n in range(min(self.longest, len(known) - 1), self.shortest - 1, -1):
            for start in range(len(known) - n - 1, -1, -1):
                if known[start : start + n] == known[-n:]:
                    grown = list(known)
                    for i in range(k):
                        grown.append(grown[start + n + i])
                    return grown[len(known) :]
        return None


@dataclass
class Report:
    """What happened in a schedule: launched programs, results, errors and metrics."""

    launches: list[list[Any]] = field(default_factory=list)
    rows: list[Any] = field(default_factory=list)  # the results of each part of a step, as read
    told: list[dict[Any, tuple[list[int], str | None]]] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    metrics: dict[str, Any] = field(default_factory=dict)


def differences(one: Report, other: Report) -> list[str]:
    """Describe the differences of two reports of the same schedule, beginning with the first."""
    found = []
    for what in "launches", "rows", "told":
        ours, theirs = getattr(one, what), getattr(other, what)
        pairs = enumerate(zip(ours, theirs, strict=False))
        found += [f"{what}, number {i}: {a} and {b}" for i, (a, b) in pairs if a != b][:1]
        if len(ours) != len(theirs):
            found.append(f"{what}: {len(ours)} and {len(theirs)}")
    if one.errors != other.errors:
        found.append(f"errors {one.errors} and {other.errors}")
    names = sorted(one.metrics.keys() | other.metrics.keys())
    differing = [name for name in names if one.metrics.get(name) != other.metrics.get(name)]
    return found + [f"{n}: {one.metrics.get(n)} and {other.metrics.get(n)}" for n in differing]


def run_schedule(llm: LLM, seed: int) -> Report:
    """Serve the requests of a seed on an idle engine, and report what happened.

    Some requests are aborted, and some schedules have few pages, so that requests are preempted.
    """
    rng = np.random.default_rng([seed, 7])
    engine, report = llm.engine, Report()
    num_snapshots = engine.config.num_snapshots if is_recurrent(engine.target) else None
    policy = AnyPolicy(KS, np.random.default_rng([seed, 8]))
    is_async, caches = chance(rng, 0.7), chance(rng, 0.7)
    budget = int(rng.choice([10, engine.config.max_num_batched_tokens]))
    num_pages = engine.config.pages_per_seq + int(rng.choice([0, 0, 2, 48]))
    engine.reset()
    engine.config = replace(engine.config, async_scheduling=is_async)
    changed = replace(
        engine.config,
        enable_prefix_caching=caches,
        max_num_scheduled_tokens=budget,
        num_pages=num_pages,
    )
    windows = page_windows(engine.target, engine.config)
    engine.scheduler = Scheduler(changed, policy, num_snapshots=num_snapshots, windows=windows)
    engine.set_policy(policy)
    engine._recorder = Recorder()
    requests = make_requests(llm, rng)
    commit, run = engine.scheduler.commit, engine.programs.run
    failing = int(rng.integers(20, 40)) if chance(rng, 0.3) else -1

    def noting(key: Any, *arguments: Any) -> Any:
        report.launches[-1].append(key)
        if sum(map(len, report.launches)) == failing:
            engine.programs.release()
            raise jax.errors.JaxRuntimeError("a launch was to fail")
        return run(key, *arguments)

    def committing(part: Any, rows: Any) -> Any:
        report.rows.append([(list(row.tokens), row.num_drafts) for row in rows])
        return commit(part, rows)

    engine.programs.run, engine.scheduler.commit = noting, committing
    try:
        samples = _serve(llm, requests, rng, report)
    finally:
        del engine.programs.run
        engine.config = replace(engine.config, async_scheduling=True)
    metrics = engine.metrics().as_dict()
    report.metrics = {n: value for n, value in metrics.items() if n not in NOT_COMPARED}
    report.metrics["outputs"] = [sample.output for sample in samples]
    return report


def _serve(llm: LLM, requests: list[Request], rng: Any, report: Report) -> list[Sample]:
    engine, coming = llm.engine, list(requests)
    samples: list[Sample] = []
    rate = float(rng.choice([0.3, 2, 20]))
    while coming or engine.has_work:
        for _ in range(min(len(coming), int(rng.poisson(rate)))):
            samples += engine.add(coming.pop(0))
        if samples and chance(rng, 0.05):
            engine.abort(requests[rng.integers(len(requests))].request_id)
        report.launches.append([])
        try:
            touched = engine.step()
        except jax.errors.JaxRuntimeError as error:
            report.errors.append(str(error))
            touched = []
        report.told.append(
            {(s.request.request_id, s.index): (list(s.output), s.finish_reason) for s in touched}
        )
        assert len(report.told) < 1000, "no end in sight"
    engine.drain()
    return samples


def make_requests(llm: LLM, rng: Any) -> list[Request]:
    """Return greedy requests with various stop ids and limits. Many prompts share a prefix."""
    config, vocab_size = llm.engine.config, llm.target.vocab_size
    longest = config.max_model_len - MAX_OUTPUT
    families = rng.integers(0, vocab_size, (2, longest)).tolist()
    requests = []
    for i in range(int(rng.integers(4, 9))):
        length = int(rng.integers(1, longest // rng.choice([1, 4, 8]) + 1))
        common = families[rng.integers(2)][: rng.integers(0, length + 1)]
        # Prompt lookup finds drafts only if a part of the prompt is repeated.
        part = rng.integers(0, vocab_size, int(rng.integers(2, 9))).tolist()
        prompt = [*common, *(part * length)][:length]
        stops = rng.integers(0, vocab_size, 4).tolist() if chance(rng, 0.4) else []
        params = SamplingParams(
            n=2 if chance(rng, 0.2) else 1,
            temperature=0.0,
            seed=i,
            max_tokens=MAX_OUTPUT if chance(rng, 0.5) else int(rng.integers(1, MAX_OUTPUT + 1)),
            stop_token_ids=stops,
            ignore_eos=True,
        )
        requests.append(llm.request_maker.make(prompt, params, i, f"prompt {i}"))
    return requests


def tally(reports: Sequence[Report]) -> Counter:
    """Count the events in all of these reports."""
    counts: Counter = Counter()
    for report in reports:
        counts["errors"] += len(report.errors)
        counts["aborted"] += report.metrics["requests_finished"].get("abort", 0)
        counts["stopped"] += report.metrics["requests_finished"].get("stop", 0)
        for name in "num_preemptions", "prefix_cache_hits", "num_accepted_tokens":
            counts[name] += report.metrics[name]
        counts["rejected"] += report.metrics["num_draft_tokens"]
        counts["rejected"] -= report.metrics["num_accepted_tokens"]
    return counts
