"""Measures the host's work per step, in milliseconds by phase.

    python benchmarks/host_time.py
    python benchmarks/host_time.py --only simulated --steps 100

The engine's loop runs on the tests' simulated device, whose time is excluded. For up to 64
requests, the loop also runs on this machine's CPU, with demo-llama and its EAGLE-3 drafter. On the
CPU, the phase `run` includes the part of XLA's computation that is done before the call returns.
"""

import argparse
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from report import RESULTS, provenance, summary, write_result

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "tests"))

from support.engines import simulated_engine as support_engine  # noqa: E402

from specjax import LLM  # noqa: E402
from specjax.checkpoint.demo import demo_folder  # noqa: E402
from specjax.config import EngineConfig  # noqa: E402
from specjax.engine.engine import Engine  # noqa: E402
from specjax.host.request import Request  # noqa: E402
from specjax.host.speculation.policy import StaticPolicy  # noqa: E402
from specjax.sampling_params import SamplingParams  # noqa: E402

NUM_REQUESTS, KS = {"simulated": (1, 64, 256), "cpu": (1, 64)}, (0, 3)
PROMPT, VOCAB, PAGE_SIZE = 32, 1000, 16
PHASES = ("schedule", "pack", "run", "unpack", "commit", "other")


def main() -> None:
    """Measure the requested parts, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60, help="default: %(default)s")
    parser.add_argument("--only", choices=("simulated", "cpu"))
    settings = parser.parse_args()
    source = provenance()
    devices = {"simulated": simulated_engine, "cpu": cpu_engine}
    tables = []
    for device, make in devices.items():
        if settings.only in (None, device):
            tables.append(measure(device, make, settings.steps))
    result = {
        "title": "The host's time per step",
        "description": "Milliseconds of the loop's thread per step in which all requests decode, "
        "with another step in flight.",
        "provenance": source,
        "settings": vars(settings),
        "tables": tables,
    }
    if settings.only is None:
        write_result(RESULTS / "host_time.json", result)


def measure(device: str, make: Callable[..., Any], num_steps: int) -> dict[str, Any]:
    """Return a table of times per step, by number of requests and K."""
    rows = []
    for num_requests in NUM_REQUESTS[device]:
        for k in KS:
            with make(num_requests, k, PROMPT + (num_steps + 20) * (k + 1)) as engine:
                times = step_times(engine, num_requests, num_steps)
            host = [sum(step.values()) - step["run"] * (device == "simulated") for step in times]
            parts = [summary([step[phase] for step in times])[0] for phase in PHASES]
            rows.append([num_requests, k, summary(host), *parts])
            print(device, *rows[-1], sep="\t", flush=True)
    return {
        "title": f"On a {device} device",
        "columns": ["requests", "K", "ms per step", *PHASES],
        "rows": rows,
        "notes": [
            f"Prompts of {PROMPT} tokens, pages of {PAGE_SIZE}, prefix caching on; "
            + ("the device's `run` is not in the sum." if device == "simulated" else "greedy.")
        ],
    }


def step_times(engine: Engine, num_requests: int, num_steps: int) -> list[dict[str, float]]:
    """Return the milliseconds of each phase, for every step in which all requests decode."""
    max_tokens = engine.config.max_model_len - PROMPT
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    samples = []
    for i in range(num_requests):
        prompt = tuple((7 * i + j) % VOCAB for j in range(PROMPT))
        samples += engine.add(Request(i, prompt, params, max_tokens, (i,)))
    while not all(sample.num_output for sample in samples):
        engine.step()
    times = []
    with timed_phases(engine) as spent:
        for _ in range(num_steps):
            spent.clear()
            start = time.thread_time()
            engine.step()
            total = 1e3 * (time.thread_time() - start)
            times.append(dict(spent) | {"other": total - sum(spent.values())})
    assert all(not sample.is_finished for sample in samples)
    return times


@contextmanager
def timed_phases(engine: Engine) -> Iterator[Counter]:
    """Time the calls that make up the phases of a step.

    Yield a counter, to which the milliseconds of each phase are added.
    """
    spent: Counter = Counter()

    def timed(phase: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **options: Any) -> Any:
            start = time.thread_time()
            try:
                return call(*arguments, **options)
            finally:
                spent[phase] += 1e3 * (time.thread_time() - start)

        return run

    from specjax.engine import engine as loop
    from specjax.engine import launcher

    with (
        patch.object(engine.scheduler, "schedule", timed("schedule", engine.scheduler.schedule)),
        patch.object(launcher, "pack", timed("pack", launcher.pack)),
        patch.object(engine.programs, "run", timed("run", engine.programs.run)),
        patch.object(loop, "unpack_outputs", timed("unpack", loop.unpack_outputs)),
        patch.object(engine.scheduler, "commit", timed("commit", engine.scheduler.commit)),
    ):
        yield spent


@contextmanager
def simulated_engine(num_requests: int, k: int, max_model_len: int) -> Iterator[Engine]:
    """Open an engine on the simulated device."""
    config = EngineConfig(
        max_model_len=max_model_len,
        max_num_seqs=num_requests,
        max_num_batched_tokens=num_requests * max(k + 1, PROMPT),
        num_pages=num_requests * -(-max_model_len // PAGE_SIZE),
        page_size=PAGE_SIZE,
        compile_ahead=True,
    )
    yield support_engine(config, StaticPolicy(k), VOCAB)


@contextmanager
def cpu_engine(num_requests: int, k: int, max_model_len: int) -> Iterator[Engine]:
    """Open an engine on this machine's CPU."""
    with LLM(
        demo_folder("demo-llama"),
        speculative_config={
            "method": "eagle3",
            "model": str(demo_folder("demo-llama-eagle3")),
            "num_speculative_tokens": max(k, 1),
        },
        max_model_len=max_model_len,
        max_num_seqs=num_requests,
        decode_batches=(num_requests,),
        prefill_shapes=((num_requests, PROMPT),),
        max_num_batched_tokens=num_requests * PROMPT,
        page_size=PAGE_SIZE,
        compile_ahead=True,
        verbose=False,
    ) as llm:
        llm.engine.set_policy(StaticPolicy(k))
        yield llm.engine


if __name__ == "__main__":
    main()
