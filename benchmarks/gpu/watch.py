"""Measures how much other events delay steps: graph updates, compiling and arriving requests."""

import itertools
import os
import re
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
from engines import Chosen, free, make_engine, make_models, make_requests
from seed import RATES
from timing import Setting, attempt, spread

from specjax.engine.engine import Engine
from specjax.engine.programs import Begin, Decode, Joined

MODEL, KS = "Llama-3.1-8B", (3, 0)
NUM_STEPS = 20


def measure_updates(setting: Setting) -> Iterator[dict[str, Any]]:
    """Count XLA's updates of CUDA graphs during some steps.

    The case's environment makes XLA log the updates. A graph is recorded again, with all its
    kernels, when the address of an array has changed.
    """
    models, ks = make_models(MODEL, setting), setting.pick(KS, (1,))
    policy = Chosen(ks)
    engine = make_engine(models, 1, policy, RATES[:3], setting)
    for k in ks:
        policy.k = k

        def one() -> dict[str, Any]:
            vocab_size, output = engine.target.vocab_size, engine.config.max_model_len // 2
            for request in make_requests(1, vocab_size, setting.pick(output, 8), setting):
                engine.add(request)
            for _ in range(3):  # the prompt, and steps that touch memory for the first time
                engine.step()
            with _said() as lines:
                times = _times(engine, lambda: None, setting.pick(NUM_STEPS, 3))
            engine.abort(0)
            engine.drain()
            kinds = Counter(re.sub(r"\d+", "#", line.partition("]")[2].strip()) for line in lines)
            updates = [line for line in lines if "Updated command buffer" in line]
            return {
                "steps_ms": times,
                "updates_per_step": len(updates) / times["count"],
                "updated_nodes": sorted({_number_after("num_commands=", line) for line in updates}),
                "update_us": sum(_number_after(" in ", line) for line in updates) / times["count"],
                "lines_per_step": {
                    kind: count / times["count"] for kind, count in kinds.most_common(8)
                },
            }

        yield attempt({"what": "graph updates", "model": MODEL, "batch": 1, "k": k}, one)


@contextmanager
def _said() -> Iterator[list[str]]:
    """Collect XLA's lines about graphs from standard error.

    The yielded list is filled when the block ends. The file descriptor is replaced, because XLA's
    C++ code does not write to `sys.stderr`.
    """
    lines: list[str] = []
    with tempfile.TemporaryFile("w+", errors="replace") as file:
        before = os.dup(2)
        os.dup2(file.fileno(), 2)
        try:
            yield lines
        finally:
            os.dup2(before, 2)
            os.close(before)
            file.seek(0)
            lines += [line for line in file if "command_buffer" in line]


def _number_after(mark: str, line: str) -> int:
    found = re.search(re.escape(mark) + r"(\d+)", line)
    return int(found[1]) if found else 0


def measure_compiling(setting: Setting) -> Iterator[dict[str, Any]]:
    """Time steps of 16 requests before, during and after background compilation."""
    models = make_models(MODEL, setting)
    batch, output, others = setting.pick((16, 8000, (1, 2, 4, 6, 8, 10, 12, 14)), (2, 60, (1,)))
    policy = Chosen((0,))
    engine = make_engine(models, batch, policy, (), setting, is_plain=True, room=output)
    for request in make_requests(batch, engine.target.vocab_size, output, setting):
        engine.add(request)
    _times(engine, lambda: None, setting.pick(100, 8))
    (decode,) = (key for key in engine.programs.ready if isinstance(key, Decode))
    keys = [Decode(other, decode.k, decode.variant) for other in others]
    for way in "before", "meanwhile", "after":
        row = {"what": "compiling during steps", "model": MODEL, "batch": batch, "way": way}

        def one(way: str = way) -> dict[str, Any]:
            def goes_on() -> bool:
                return way != "meanwhile" or engine.programs.is_compiling

            start = time.perf_counter()
            if way == "meanwhile":
                engine.programs.compile_behind(keys, is_urgent=False)
            most = setting.pick(6000 if way == "meanwhile" else 300, 12)
            times = _times(engine, lambda: None, most, goes_on)
            seconds = time.perf_counter() - start
            engine.programs.finish(show_progress=False)
            return {"steps_ms": times, "wait_s": seconds, "programs": len(engine.programs.ready)}

        yield attempt(row, one)


def measure_arrivals(setting: Setting) -> Iterator[dict[str, Any]]:
    """Time steps of a full batch in which about one request ends and another arrives per step.

    Chunks of prompts and rounds run first in separate programs, and then joined in one program.
    """
    batch, most = setting.pick((64, 300), (2, 8))
    models, ks = make_models(MODEL, setting), setting.pick(KS, (1,))
    policy = Chosen(ks)
    rows, width = setting.pick((16, 128), (4, 16))  # at first, all prompts come at once
    shapes = (1, width), (rows, width)
    engine = make_engine(
        models, batch, policy, RATES[:3], setting, room=batch, prefill_shapes=shapes
    )
    programs, num_joined = engine.programs, [0]
    run_usual = programs.run

    def run(key: Any, *arguments: Any) -> Any:
        num_joined[0] += isinstance(key, Joined)
        return run_usual(key, *arguments)

    programs.run = run
    for way in "apart", "joined":
        for k in ks:
            policy.k = k
            row = {"what": "arrivals", "model": MODEL, "batch": batch, "k": k, "way": way}

            def one(way: str = way, k: int = k) -> dict[str, Any]:
                if way == "joined":
                    programs.compile_behind([_joined(engine, k)], is_urgent=True)
                    programs.finish(show_progress=False)
                arrive = _arrivals(engine, k, setting)
                _times(engine, arrive, setting.pick(2 * batch, 2))  # until the batch is full
                before, tokens = num_joined[0], engine.metrics().num_generation_tokens
                times = _times(engine, arrive, most)
                tokens = engine.metrics().num_generation_tokens - tokens
                found = {
                    "steps_ms": times,
                    "tokens_per_second": 1e3 * tokens / (times["mean"] * times["count"]),
                    "joined_steps": num_joined[0] - before,
                }
                for name in list(engine.unfinished_ids):
                    engine.abort(name)
                engine.drain()
                return found

            yield attempt(row, one)
    free(engine)


def _joined(engine: Engine, k: int) -> Joined:
    """Return the key of the program that joins a chunk of one prompt and a full batch's round."""
    ready = engine.programs.ready
    begin = next(key for key in ready if isinstance(key, Begin) and key.batch == 1)
    decode = next(key for key in ready if isinstance(key, Decode) and key.k == k)
    return Joined(Begin(begin.batch, begin.width, engine.repertoire.variants[0]), decode)


def _arrivals(engine: Engine, k: int, setting: Setting) -> Callable[[], None]:
    """Return a function that adds a request if the batch is not full.

    Each request runs for about `max_num_seqs` steps, so that about one request arrives per step.
    """
    batch, names = engine.config.max_num_seqs, itertools.count()
    output = setting.pick(round(batch * (1 + sum(RATES[:k]))), 4)

    def arrive() -> None:
        if len(engine.unfinished_ids) < batch:
            (request,) = make_requests(1, engine.target.vocab_size, output, setting)
            engine.add(replace(request, request_id=next(names)))

    return arrive


def _times(
    engine: Engine,
    before: Callable[[], None],
    most: int,
    goes_on: Callable[[], bool] = lambda: True,
) -> dict[str, float]:
    """Return statistics of the milliseconds of up to `most` steps.

    `before` is called before each step. After the first step, `goes_on` tells before each further
    step whether to continue.
    """
    times = []
    while len(times) < most and (goes_on() or not times):
        before()
        start = time.perf_counter()
        engine.step()
        times.append(time.perf_counter() - start)
    tail = {"p99": float(np.quantile(times, 0.99)) * 1e3, "max": max(times) * 1e3}
    return spread(times, 1e3) | tail | {"mean": sum(times) / len(times) * 1e3}
