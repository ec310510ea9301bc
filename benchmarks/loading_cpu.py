"""Measures the cost of loading a 1 GB float8 checkpoint: time, resident bytes and peak memory.

    python benchmarks/loading_cpu.py

The checkpoint has random weights, with a scale for each block of 128 x 128. Two measurements take
turns, each time in a new process: loading the checkpoint, and only reading the bytes of its file.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from report import RESULTS, provenance, render, summary, write_result

BLOCK, LAYERS, WIDTH, INNER, HEADS, VOCAB = 128, 20, 2048, 5632, 16, 32000
ROUNDS = 5
BF16 = np.dtype(ml_dtypes.bfloat16)
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]},
}
ATTENTION = dict.fromkeys(("q_proj", "k_proj", "v_proj", "o_proj"), (WIDTH, WIDTH))
MLP = {"gate_proj": (INNER, WIDTH), "up_proj": (INNER, WIDTH), "down_proj": (WIDTH, INNER)}


def main() -> None:
    """Measure, or run one of the measured processes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", nargs=2, metavar=("NAME", "FOLDER"), help=argparse.SUPPRESS)
    settings = parser.parse_args()
    if settings.run:
        name, folder = settings.run
        print(json.dumps(RUNS[name](Path(folder))))
        return
    source = provenance()
    samples: dict[str, list[dict[str, float]]] = {name: [] for name in RUNS}
    with tempfile.TemporaryDirectory() as folder:
        size = write_checkpoint(Path(folder))
        for _ in range(ROUNDS):
            for name in RUNS:
                samples[name].append(run(name, folder))
    result = {
        "title": "Loading a float8 checkpoint",
        "description": f"A Llama of {LAYERS} layers with random float8 weights in blocks, "
        f"{size / 1e9:.2f} GB, whose files are in the operating system's cache. "
        f"{ROUNDS} processes each, in turn.",
        "provenance": source,
        "tables": [table(samples, size)],
        "samples": samples,
    }
    write_result(RESULTS / "loading_cpu.json", result)
    print(render(result))


def write_checkpoint(folder: Path) -> int:
    """Write the checkpoint, and return the bytes of its weights."""
    from specjax.checkpoint import safetensors_file

    tensors = dict(make_tensors(np.random.default_rng(0)))
    layout = {name: (x.dtype, x.shape) for name, x in tensors.items()}
    safetensors_file.write(folder / "model.safetensors", layout, iter(tensors.items()))
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return sum(x.nbytes for x in tensors.values())


def make_tensors(rng: np.random.Generator) -> Iterator[tuple[str, np.ndarray]]:
    """Yield each tensor of the checkpoint, with its name."""
    for name in ("model.embed_tokens", "lm_head"):
        yield f"{name}.weight", rng.standard_normal((VOCAB, WIDTH), np.float32).astype(BF16)
    yield "model.norm.weight", np.ones(WIDTH, BF16)
    for i in range(LAYERS):
        layer = f"model.layers.{i}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield f"{layer}.{norm}.weight", np.ones(WIDTH, BF16)
        for part, matrices in (("self_attn", ATTENTION), ("mlp", MLP)):
            for name, shape in matrices.items():
                # Bit patterns of all numbers that are positive or zero.
                bits = rng.integers(0, 0x7F, shape, np.uint8)
                yield f"{layer}.{part}.{name}.weight", bits.view(ml_dtypes.float8_e4m3fn)
                scales = rng.uniform(1e-4, 1e-3, (shape[0] // BLOCK, shape[1] // BLOCK))
                yield f"{layer}.{part}.{name}.weight_scale_inv", scales.astype(np.float32)


def run(name: str, folder: str) -> dict[str, float]:
    """Run the measurement `name` in a new process; return its seconds and bytes."""
    command = [sys.executable, __file__, "--run", name, folder]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def measure(work: Callable[[], int]) -> dict[str, float]:
    """Return the seconds of `work`, the bytes that it keeps, and the memory at its peak.

    The memory is the peak of the process during `work`, less the memory before.
    """
    Path("/proc/self/clear_refs").write_text("5")  # forget earlier peaks
    before, start = peak_bytes(), time.perf_counter()
    kept = work()
    seconds = time.perf_counter() - start
    return {"seconds": seconds, "resident": kept, "peak": peak_bytes() - before}


def peak_bytes() -> int:
    """Return the largest resident size of this process, on Linux."""
    lines = Path("/proc/self/status").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    return int(fields["VmHWM"].split()[0]) * 1024


def load(folder: Path) -> dict[str, float]:
    """Measure loading the checkpoint as an engine does."""
    import jax

    from specjax.device.models.registry import load_model

    jax.block_until_ready(jax.numpy.zeros(1))  # start the backend

    def work() -> int:
        _, params = load_model(folder, BF16)
        return sum(x.nbytes for x in jax.block_until_ready(jax.tree.leaves(params)))

    return measure(work)


def read(folder: Path) -> dict[str, float]:
    """Measure reading the file into memory."""
    return measure(lambda: len((folder / "model.safetensors").read_bytes()))


RUNS = {"read": read, "load": load}


def table(samples: dict[str, list[dict[str, Any]]], size: int) -> dict[str, Any]:
    """Return the table of both runs."""
    rows = []
    for name, found in samples.items():
        seconds = summary([one["seconds"] for one in found])
        rows.append(
            [name, seconds, *(summary([x[k] / size for x in found]) for k in ("resident", "peak"))]
        )
    ratios = [
        a["seconds"] / b["seconds"] for a, b in zip(samples["load"], samples["read"], strict=True)
    ]
    return {
        "title": "Reading the file, and loading the model",
        "columns": ["", "seconds", "bytes kept / bytes of weights", "peak / bytes of weights"],
        "rows": rows,
        "notes": [
            f"Loading takes {summary(ratios)[0]:.1f} times as long as reading. It includes the "
            "check that no weight is NaN or infinite. The peak counts from the start of the work."
        ],
    }


if __name__ == "__main__":
    main()
