"""Compares adaptive K, after a run in which it learns the load, with every static K."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median
from typing import Any

from engines import make_engine, make_models, make_requests
from seed import RATES
from timing import Setting, attempt

from specjax.bench.measure import decode
from specjax.engine.engine import Engine
from specjax.host.speculation.methods import adaptive_policy
from specjax.host.speculation.policy import DecodeLoad, Policy, PolicyRule, Round
from specjax.host.speculation.step_cost import StepCost

MODEL, MAX_K, OUTPUT, ROUNDS = "Llama-3.1-8B", 3, 256, 3


@dataclass
class Switched(PolicyRule):
    """A policy with a fixed K, or with adaptive K if `k` is None.

    All alternatives can then use one engine, which measures its step times only once.
    """

    adaptive: Policy
    k: int | None = None
    is_learning: bool = True

    @property
    def choices(self) -> tuple[int, ...]:
        """The adaptive policy's choices."""
        return self.adaptive.choices

    def begin(self, replay: Callable[[], StepCost]) -> None:
        """Call `begin` of the adaptive policy."""
        self.adaptive.begin(replay)

    def shape_ready(self, batch: int, k: int, time: Callable[[], float]) -> None:
        """Call `shape_ready` of the adaptive policy."""
        self.adaptive.shape_ready(batch, k, time)

    def choose(self, load: DecodeLoad) -> int:
        """Return the fixed K, or the adaptive policy's choice if `k` is None."""
        return self.adaptive.choose(load) if self.k is None else self.k

    def observe(self, outcome: Round) -> None:
        """Pass a round to the adaptive policy if it chose the round's K."""
        if self.k is None:
            self.adaptive.observe(outcome)


def measure_adaptive(setting: Setting) -> Iterator[dict[str, Any]]:
    """Yield, for each batch size, the tokens per second of adaptive K and of every static K.

    Adaptive K first learns in a run that does not count. The alternatives then run in turn.
    """
    batches = setting.pick((64, 4, 1, 16), (1,))  # on a CPU, the same programs as in host/1
    policy = Switched(adaptive_policy(setting.pick(MAX_K, 1)))
    models = make_models(MODEL, setting)
    engine = make_engine(
        models, max(batches), policy, RATES[:MAX_K], setting,
        decode_batches=tuple(sorted(batches)), room=setting.pick(OUTPUT, 0),
    )  # fmt: skip
    for batch in batches:
        row = {"what": "adaptive K", "model": MODEL, "batch": batch}
        yield attempt(row, lambda batch=batch: _compare(engine, policy, batch, setting))


def _compare(engine: Engine, policy: Switched, batch: int, setting: Setting) -> dict[str, Any]:
    output = setting.pick(OUTPUT, 8)

    def run(k: int | None) -> float:
        policy.k = k
        requests = make_requests(batch, engine.target.vocab_size, output, setting)
        return decode(engine, requests).tokens_per_second

    run(None)
    names = {"adaptive": None} | {f"K={k}": k for k in policy.choices}
    rounds = [{name: run(k) for name, k in names.items()} for _ in range(setting.pick(ROUNDS, 1))]
    middle = {name: median(one[name] for one in rounds) for name in names}
    best = max(speed for name, speed in middle.items() if name != "adaptive")
    return {
        "tokens_per_second": middle,
        "runs": rounds,
        "ratio": middle["adaptive"] / best,
    }
