"""Measures the time to load weights, and the time until an engine's first token.

Engines start without compiled programs on disk, and with them.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from engines import Chosen, make_engine, make_models, make_requests, random_params, read_config
from seed import RATES
from timing import Setting, attempt, spread

from specjax.bench.measure import decode
from specjax.checkpoint.save import save_checkpoint
from specjax.device.models.hf_config import HFConfig
from specjax.device.models.registry import describe_model, load_model

MODEL, K = "Llama-3.1-8B", 3
NUM_TOKENS = 32
LAYERS = 8  # number of layers of the checkpoint to load, which has 5.6 GB
ROUNDS = 3
# Figures that must not change if programs are read from disk: the tokens, and the memory that
# programs overwrite and need. The memory in use must be about equal.
KEPT, MAX_MORE_BYTES = ("tokens", "alias_bytes", "temp_bytes"), 2**26


def measure_loading(setting: Setting) -> Iterator[dict[str, Any]]:
    """Time loading a checkpoint to the device, in turn with a plain read of its file.

    The weights are random. The file was written just before, so both read it from the system's
    cache, if it fits there.
    """
    config = read_config(MODEL, setting) | setting.pick({"num_hidden_layers": LAYERS}, {})
    target, dtype = describe_model(HFConfig(config, MODEL)), jnp.dtype("bfloat16")

    def one() -> dict[str, Any]:
        with tempfile.TemporaryDirectory(prefix="gpu-loading-") as name:
            folder, specs = Path(name), target.specs()
            save_checkpoint(folder, specs, random_params(specs, dtype.name, 0), config, dtype=dtype)
            file = folder / "model.safetensors"
            pairs = [(_read(file), _load(folder, dtype)) for _ in range(setting.pick(ROUNDS, 1))]
            plain, ms = (spread(list(times), 1e3) for times in zip(*pairs, strict=True))
            size = file.stat().st_size
        return {
            "bytes": size,
            "ms": ms,
            "plain_ms": plain,
            "file_gbps": size / ms["median"] / 1e6,
            "plain_gbps": size / plain["median"] / 1e6,
        }

    yield attempt({"what": "loading", "model": MODEL}, one)


def _read(file: Path) -> float:
    buffer, start = bytearray(2**24), time.perf_counter()
    with file.open("rb", buffering=0) as stream:
        while stream.readinto(buffer):
            pass
    return time.perf_counter() - start


def _load(folder: Path, dtype: Any) -> float:
    start = time.perf_counter()
    _, params = load_model(folder, dtype)
    jax.block_until_ready(params)
    return time.perf_counter() - start


def measure_start(setting: Setting) -> Iterator[dict[str, Any]]:
    """Measure two starts of an engine, and compare them.

    Each start is a process. Both have the same folder for compiled programs, which is empty at
    first.
    """
    found = []
    with tempfile.TemporaryDirectory(prefix="gpu-start-") as cache:
        for way in "cold", "warm":
            row = {"what": "start", "model": MODEL, "k": K, "way": way}
            found.append(attempt(row, lambda: _start(cache, setting)))
            yield found[-1]
    same = {name: [one.get(name) for one in found] for name in (*KEPT, "bytes_in_use")}
    passes = None not in same["tokens"] and all(same[name][0] == same[name][1] for name in KEPT)
    passes = passes and abs(same["bytes_in_use"][0] - same["bytes_in_use"][1]) <= MAX_MORE_BYTES
    yield {"what": "kept programs", "model": MODEL, "k": K, **same, "passes": passes}


def _start(cache: str, setting: Setting) -> dict[str, Any]:
    command = [sys.executable, __file__, json.dumps(setting.is_cpu)]
    environment = os.environ | {"JAX_COMPILATION_CACHE_DIR": cache}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise RuntimeError(done.stderr[-400:])
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    """Start an engine with default sizes, and print the times of its phases."""
    setting = Setting(is_cpu=json.loads(sys.argv[1]))
    models = make_models(MODEL, setting)
    jax.block_until_ready((models.params, models.plain_params))
    start = time.perf_counter()
    batch, budget = setting.pick((64, 8192), (2, 32))
    engine = make_engine(
        models, batch, Chosen((K,), k=K), RATES, setting, compile_ahead=False,
        max_num_batched_tokens=budget, decode_batches=None, prefill_shapes=None,
    )  # fmt: skip
    (request,) = make_requests(1, models.target.vocab_size, 1, setting)
    engine.add(request)
    while engine.has_work:
        engine.step()
    first, at_first = time.perf_counter() - start, engine.metrics().num_compilations
    engine.programs.finish(show_progress=False)
    found = {
        "ms": first * 1e3,
        "programs_at_first_token": at_first,
        "ms_to_all": (time.perf_counter() - start) * 1e3,
        "programs": engine.metrics().num_compilations,
        "compile_ms": engine.metrics().compile_seconds * 1e3,
    }
    (request,) = make_requests(1, models.target.vocab_size, setting.pick(NUM_TOKENS, 4), setting)
    # Only the compiled programs tell how much memory they overwrite.
    sizes = [one.memory_analysis() for one in engine.programs._compiler.ready.values()]
    found |= {
        "tokens": list(decode(engine, [request]).outputs[0]),
        "bytes_in_use": (jax.devices()[0].memory_stats() or {}).get("bytes_in_use", 0),
        "alias_bytes": sum(one.alias_size_in_bytes for one in sizes),
        "temp_bytes": sum(one.temp_size_in_bytes for one in sizes),
    }
    engine.close()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
