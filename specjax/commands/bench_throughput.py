"""Runs `specjax bench throughput`."""

import argparse
from contextlib import ExitStack

from specjax.bench.describe import closing_lines, peer_lines, speculation_lines, step_lines
from specjax.bench.offline import Offline
from specjax.bench.peers import BATCH_PEERS
from specjax.bench.peers.peer import Work
from specjax.bench.peers.process import BatchPeer
from specjax.bench.result import Details
from specjax.bench.throughput import Rounds, measure, middle, of_rounds, peers_of
from specjax.checkpoint.hub import resolve
from specjax.checks import check_positive, did_you_mean
from specjax.commands.bench_offline import OfflineRun

SHOWN = {
    "requests_per_second": "requests/s",
    "output_tokens_per_second": "output tokens/s",
    "tokens_per_second": "total tokens/s",
}


def run(args: argparse.Namespace) -> int:
    """Run the benchmark and show its result. Return 1 if another engine died, else 0.

    If an engine dies, or after an interrupt, the result covers the completed runs.
    """
    check_positive(**{"--rounds": args.rounds})
    peers = read_peers(args.against)
    asked = OfflineRun.read(
        "throughput", args, num_prompts=args.num_prompts, ignore_eos=args.ignore_eos
    )
    found, is_interrupted, failure = Rounds(), False, None
    with ExitStack() as stack:
        offline = stack.enter_context(asked.opened())
        work = work_of(asked, offline)
        workers = {
            name: stack.enter_context(peer.open(work, args.seed)) for name, peer in peers.items()
        }
        asked.warm_up(offline, 1)
        try:
            measure(offline, asked.prompts, args.rounds, workers, found)
        except KeyboardInterrupt:
            is_interrupted = True
            if not found.batches:
                raise
        except ValueError as error:  # a peer has died; what was measured is kept
            if not found.batches:
                raise
            failure = str(error)
        asked.finish(offline, found.batches[0])
        rounds = of_rounds(found, asked.queries)
        details = asked.details(found.batches, rounds)
        details.is_interrupted = is_interrupted or failure is not None
        if failure is not None:
            details.failures[failure] = 1
        details.peers = peers_of(found, workers, asked.queries)
    top = {**middle(rounds), "model_id": asked.model}
    asked.write(top, details, describe(top, details, asked.model))
    if is_interrupted:
        raise KeyboardInterrupt
    return 0 if failure is None else 1


def read_peers(names: list[str]) -> dict[str, BatchPeer]:
    """Return the other engines to compare with, by name.

    Raises:
        ValueError: a peer is not a library, is not installed, or is named twice.
    """
    peers: dict[str, BatchPeer] = {}
    for name in names:
        if name in peers:
            raise ValueError(f"--against {name} is given twice")
        if name not in BATCH_PEERS:
            raise ValueError(
                f"--against {name}: bench throughput runs against {', '.join(BATCH_PEERS)}, and "
                f"bench serve against servers{did_you_mean(name, BATCH_PEERS)}"
            )
        peers[name] = BATCH_PEERS[name]
        peers[name].check(name)
    return peers


def work_of(asked: OfflineRun, offline: Offline) -> Work:
    """Return the `Work` for other engines: the prompts, and the settings of this engine."""
    config, llm = offline.llm.engine.config, offline.llm
    return Work(
        model=str(resolve(asked.model)),
        prompts=[list(query.token_ids or ()) for query in asked.prompts],
        output_lens=[query.output_len for query in asked.prompts],
        batch_size=config.max_num_seqs,
        dtype=str(config.dtype),
        sampling=asked.sampling,
        stop_ids=list(llm.request_maker.eos_ids),
    )


def describe(top: dict[str, float], details: Details, model: str) -> list[str]:
    """Return the result as lines of text. The first three are as in `vllm bench throughput`."""
    rounds = [one["output_tokens_per_second"] for one in details.rounds]
    output = top["output_tokens_per_second"]
    data = details.dataset
    num_prompt = round(data["num_requests"] * data["mean_prompt_len"])
    return [
        f"Throughput: {top['requests_per_second']:.2f} requests/s, "
        f"{top['tokens_per_second']:.2f} total tokens/s, {output:.2f} output tokens/s",
        f"Total num prompt tokens:  {num_prompt}",
        f"Total num output tokens:  {round(top['total_num_tokens']) - num_prompt}",
        f"the median round of {len(rounds)}; output tokens/s from {min(rounds):.2f} to "
        f"{max(rounds):.2f}",
        *speculation_lines(details.speculation),
        *step_lines(details.speculation),
        *peer_lines(details, SHOWN),
        *closing_lines(details, model),
    ]
