"""Compares rollouts by two workers on two cores with rollouts by one worker.

    python benchmarks/ray_cpu.py

All workers exist from the start. The configurations run the same prompts in turn, in an order that
rotates every round, so that other load on the machine affects all of them equally. A single worker
is measured with one thread, like each of the two workers, which shows scaling. It is also measured
with two threads on both cores, which is the baseline that two workers on one machine have to beat.
"""

import argparse
import os
import time
from contextlib import ExitStack
from pathlib import Path

os.environ.setdefault("RAY_worker_niceness", "0")  # by default, workers yield to other processes

import ray
from report import RESULTS, provenance, summary, write_result

from specjax.bench.workload import read_questions
from specjax.checkpoint.demo import demo_folder
from specjax.rl.ray_workers import RayRollouts
from specjax.sampling_params import SamplingParams

ROOT = Path(__file__).resolve().parents[1]
OPTIONS = {"max_num_seqs": 8, "max_model_len": 512, "num_pages": 512}
CONFIGURATIONS = (  # name, number of workers, and threads per worker
    ("1 worker, 1 thread", 1, 1),
    ("1 worker, 2 threads", 1, 2),
    ("2 workers, 1 thread each", 2, 1),
)


def main() -> None:
    """Measure, check that all outputs are equal, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5, help="default: %(default)s")
    parser.add_argument("--prompts", type=int, default=48, help="default: %(default)s")
    parser.add_argument("--max-tokens", type=int, default=96, help="default: %(default)s")
    settings = parser.parse_args()
    source = provenance(["ray"])
    questions = read_questions()
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, configure_logging=False)
    seconds: dict[str, list[float]] = {name: [] for name, *_ in CONFIGURATIONS}
    with ExitStack() as stack:
        engines = {name: stack.enter_context(start(*rest)) for name, *rest in CONFIGURATIONS}
        for engine in engines.values():
            engine.generate(questions[:4], SamplingParams(max_tokens=8))
        names, num_tokens = list(engines), []
        for number in range(settings.rounds):
            # Prompts are numbered, so that no round finds cached pages of another round.
            asked = [
                f"{number}.{i} {questions[i % len(questions)]}" for i in range(settings.prompts)
            ]
            params = SamplingParams(max_tokens=settings.max_tokens)
            outputs, first = [], number % len(names)
            for name in [*names[first:], *names[:first]]:
                begin = time.perf_counter()
                rollouts = engines[name].generate(asked, params)
                seconds[name].append(time.perf_counter() - begin)
                outputs.append([one.token_ids.tolist() for one in rollouts])
            num_tokens.append(rollouts.num_tokens)
            assert all(output == outputs[0] for output in outputs)

    def times(name: str, base: str) -> list[float]:
        pairs = zip(seconds[base], seconds[name], strict=True)
        return summary([before / after for before, after in pairs])

    rows = []
    for name in names:
        speeds = [n / s for n, s in zip(num_tokens, seconds[name], strict=True)]
        rows.append([name, summary(speeds), times(name, names[0]), times(name, names[1])])
    table = {
        "title": f"{settings.prompts} prompts, up to {settings.max_tokens} tokens, temperature 1",
        "columns": ["configuration", "tokens/s", f"x {names[0]}", f"x {names[1]}"],
        "rows": rows,
        "notes": [
            f"All outputs were the same. {settings.rounds} rounds, each with all in turn and with "
            "other prompts (the package's questions, numbered); ratios are of the same round."
        ],
    }
    for row in [table["columns"], *rows]:
        print(*row, sep="\t")
    result = {
        "title": "Ray workers on a CPU",
        "description": "demo-llama with its EAGLE-3 drafter, K = 3; engines as Ray actors.",
        "provenance": source,
        "settings": vars(settings) | OPTIONS,
        "tables": [table],
        "samples": {"seconds": seconds},
    }
    write_result(RESULTS / "ray_cpu.json", result)
    ray.shutdown()


def start(num_workers: int, num_threads: int) -> RayRollouts:
    """Start workers with `num_threads` threads each."""
    drafter = str(demo_folder("demo-llama-eagle3"))
    environment = {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT), "NPROC": str(num_threads)}
    return RayRollouts(
        demo_folder("demo-llama"),
        num_workers=num_workers,
        ray_options={"runtime_env": {"env_vars": environment}},
        speculative_config={"method": "eagle3", "model": drafter, "num_speculative_tokens": 3},
        **OPTIONS,
    )


if __name__ == "__main__":
    main()
