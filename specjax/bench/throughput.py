"""`specjax bench throughput`: how fast an `LLM` answers many prompts that are given at once."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from specjax.bench.datasets.queries import Queries, Query
from specjax.bench.offline import BatchRun, Offline
from specjax.bench.peers.peer import as_peer, compare_outputs
from specjax.bench.peers.process import PeerProcess
from specjax.bench.result import Peer
from specjax.bench.traffic.record import Record


@dataclass(frozen=True, kw_only=True)
class Rounds:
    """The results of all runs of this engine and of its peers, the engines to compare with.

    Attributes:
        batches: the results of this engine.
        peers: seconds and records of each run, by the peer's name.
    """

    batches: list[BatchRun] = field(default_factory=list)
    peers: dict[str, list[tuple[float, list[Record]]]] = field(default_factory=dict)


def measure(
    offline: Offline,
    queries: Sequence[Query],
    num_rounds: int,
    workers: Mapping[str, PeerProcess],
    found: Rounds,
) -> None:
    """Run all prompts `num_rounds` times on this and on other engines, and fill in `found`.

    In each round, every engine runs once. The engines take turns in being the first of a round.
    After an interrupt, `found` has the completed runs. This engine must be warm; the peers run once
    before the rounds. This engine starts each run with an empty prefix cache.
    """
    for worker in workers.values():
        worker.run()
    offline.watch()
    names = ["", *workers]
    for i in range(num_rounds):
        first = i % len(names)
        for name in [*names[first:], *names[:first]]:
            if name:
                found.peers.setdefault(name, []).append(workers[name].run())
            else:
                offline.llm.reset_prefix_cache()
                found.batches.append(offline.generate(queries))


def figures(seconds: float, records: Sequence[Record], num_prompt_tokens: int) -> dict[str, Any]:
    """Return the figures that `vllm bench throughput` reports, and output tokens per second."""
    num_output = sum(record.output_len for record in records)
    total = num_prompt_tokens + num_output
    return {
        "elapsed_time": seconds,
        "num_requests": len(records),
        "total_num_tokens": total,
        "requests_per_second": len(records) / seconds,
        "tokens_per_second": total / seconds,
        "output_tokens_per_second": num_output / seconds,
    }


def middle(passes: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the figures of the run with the median time, or of the faster of two middle runs."""
    return dict(sorted(passes, key=lambda one: one["elapsed_time"])[(len(passes) - 1) // 2])


def of_rounds(found: Rounds, queries: Queries) -> list[dict[str, Any]]:
    """Return the figures of each run of this engine."""
    num_prompt = sum(len(query.token_ids or ()) for query in queries.queries)
    return [figures(one.seconds, one.records, num_prompt) for one in found.batches]


def peers_of(found: Rounds, workers: Mapping[str, PeerProcess], queries: Queries) -> list[Peer]:
    """Compare the median run of each other engine with this engine's median run."""
    num_prompt = sum(len(query.token_ids or ()) for query in queries.queries)
    own, result = middle(of_rounds(found, queries)), []
    for name, passes in found.peers.items():
        rounds = [figures(seconds, records, num_prompt) for seconds, records in passes]
        theirs = middle(rounds)
        outputs = compare_outputs(found.batches[0].records, passes[0][1])
        version = workers[name].version
        peer = as_peer(name, version, own=own, figures=theirs, outputs=outputs)
        result.append(replace(peer, rounds=rounds))
    return result
