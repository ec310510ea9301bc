"""`specjax profile`: measures round times and acceptance rates of a model, to choose K."""

import argparse
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from functools import partial
from itertools import accumulate
from operator import mul
from pathlib import Path
from statistics import median
from typing import Any

from specjax.bench.devices import set_policies
from specjax.bench.engines import Setup, open_engines, read_setup, warm_up
from specjax.bench.environment import describe_environment, describe_processors
from specjax.bench.measure import decode
from specjax.bench.profile_show import describe
from specjax.bench.stages import stages
from specjax.checkpoint.writing import check_writable, write_whole
from specjax.host.speculation.acceptance import DraftOutcome
from specjax.host.speculation.policy import DecodeLoad, PolicyRule, Round
from specjax.host.speculation.profile import Profile
from specjax.llm import LLM
from specjax.serving.dynamic_k import fingerprint


class Watched(PolicyRule):
    """A policy of constant K, which records the number of accepted drafts and the times of rounds.

    Only the times of rounds with a full batch are recorded.
    """

    is_learning = True

    def __init__(self, k: int, batch_size: int):
        self.choices = (k,)
        self._batch_size = batch_size
        self.milliseconds: list[float] = []
        self.verdicts: Counter[DraftOutcome] = Counter()

    def choose(self, load: DecodeLoad) -> int:
        """Return the constant K."""
        return self.choices[0]

    def observe(self, outcome: Round) -> None:
        """Record a round's draft outcomes, and its time if its batch was full."""
        self.verdicts.update(outcome.verdicts)
        if outcome.ms is not None and sum(outcome.verdicts.values()) == self._batch_size:
            self.milliseconds.append(outcome.ms)


def run(args: argparse.Namespace) -> int:
    """Run `specjax profile`."""
    setup = read_setup(args)
    if 0 not in setup.ks:
        raise ValueError(f"--k {args.k} lacks 0, plain decoding, which drafting has to beat")
    output = Path(args.output)
    check_writable("--output", output)
    profile = measure(setup, is_online=args.online, show_progress=True)
    text = json.dumps(profile.as_json(), indent=1)
    write_whole(output, text + "\n")
    if args.json:
        print(text)
    else:
        print(describe(profile, profile.table(setup.batch_sizes)))
        print(f"written to {output}")
    return 0


def measure(setup: Setup, *, is_online: bool, show_progress: bool) -> Profile:
    """Measure every K at every batch size, and return the profile.

    At each batch size, the Ks take turns, `setup.rounds` times. The profile stores `is_online`:
    whether policies that read the profile learn rates while serving. The measurement does not
    depend on it.
    """
    times: dict[int, dict[int, list[float]]] = {}
    verdicts: Counter[DraftOutcome] = Counter()
    total = setup.rounds * len(setup.batch_sizes) * len(setup.ks)
    workloads = {size: setup.make_requests(size) for size in setup.batch_sizes}
    with (
        open_engines(setup, show_progress=show_progress) as engines,
        stages(total, show_progress=show_progress) as begin,
    ):
        engine = engines.drafting.engine
        for batch_size, requests in workloads.items():
            at_size = times[batch_size] = {k: [] for k in setup.ks}
            for i in range(setup.rounds):
                first = i % len(setup.ks)
                for k in [*setup.ks[first:], *setup.ks[:first]]:
                    begin(f"K={k} at batch size {batch_size}")
                    each = set_policies(engine, partial(Watched, k, batch_size))
                    if not i:
                        warm_up(engine, requests)
                    for watched in each:
                        watched.milliseconds.clear()
                    decode(engine, requests)
                    for watched in each:
                        at_size[k] += watched.milliseconds
                        if k == max(setup.ks):
                            verdicts += watched.verdicts
        model = describe_model(engines.drafting)
    for batch_size, at_size in times.items():
        if empty := [k for k, found in at_size.items() if not found]:
            raise ValueError(
                f"--max-tokens {setup.max_tokens} is too few: at batch size {batch_size} no round "
                f"of K={empty[0]} ran all requests; raise it"
            )
    profile = Profile(
        step_ms={b: {k: median(found) for k, found in at.items()} for b, at in times.items()},
        rates=unconditional(verdicts, max(setup.ks)),
        max_drafts=max(setup.ks),
        is_online=is_online,
        measured=provenance(setup, model, times),
    )
    return Profile.of(profile.as_json(), "what was measured")


def unconditional(verdicts: Mapping[DraftOutcome, int], max_k: int) -> tuple[float, ...]:
    """Return for each i in 1..max_k the estimated fraction of rounds that accept at least i drafts.

    `verdicts` counts the outcomes of rounds. Each request in a round has its own outcome, so a
    round counts once for each request. A round with fewer than i drafts does not show whether draft
    i would be accepted. Therefore the estimate is the product c_1 * ... * c_i. Of the rounds that
    have a draft j and accept all drafts before it, c_j is the fraction that also accept draft j.
    """
    rates = []
    for i in range(max_k):
        accepted = sum(n for v, n in verdicts.items() if v.num_accepted > i)
        rejected = sum(n for v, n in verdicts.items() if v.num_accepted == i < v.num_drafts)
        rates.append(accepted / (accepted + rejected) if accepted else 0.0)
    return tuple(accumulate(rates, mul))


def describe_model(llm: LLM) -> str:
    """Return a fingerprint of an LLM's target and drafter, which identifies them in a profile."""
    return fingerprint(llm.target, llm.engine.drafter, llm.engine.params)


def provenance(
    setup: Setup, model: str, times: Mapping[int, Mapping[int, Sequence[float]]]
) -> dict[str, Any]:
    """Return a description of the models, the settings and the machine of a measurement.

    `model` is the fingerprint of the models. `times` holds the milliseconds of rounds by batch size
    and K.
    """
    environment = describe_environment()
    return {
        "model": model,
        "target": setup.model,
        "drafter": setup.drafter.get("model") or setup.name,
        "method": setup.name,
        "dtype": setup.dtype,
        "quantization": setup.quantization,
        "device": environment["device_kind"],
        "devices": asdict(setup.devices),
        "machine": describe_processors(environment),
        "versions": environment["versions"],
        "timestamp": datetime.now(UTC).isoformat(timespec="seconds"),
        "temperature": setup.temperature,
        "max_tokens": setup.max_tokens,
        "num_rounds_timed": {
            str(b): {str(k): len(found) for k, found in at.items()} for b, at in times.items()
        },
    }
