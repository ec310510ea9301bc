"""Measures the cost of additional rows on a CPU, for several forms of a layer's weights.

    python benchmarks/few_rows_cpu.py

A round verifies K + 1 rows. So speculation pays off if K + 1 rows cost little more than one row.
The measured program has the matrix products, norms and SwiGLU of demo-llama's layers, without
attention. A form is a way to store the weights and to multiply by them. The last form is NumPy's
BLAS.
"""

import argparse
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from report import RESULTS, provenance, summary, write_result

from specjax.device.weights.matrix import Dense

LAYERS, WIDTH, QKV, INNER = 12, 384, 640, 1024  # of demo-llama
ROWS, CALLS = (1, 2, 4, 8, 16, 32), 5
SHAPES = (WIDTH, QKV), (WIDTH, WIDTH), (WIDTH, 2 * INNER), (INNER, WIDTH)

NOTE = "One row of bfloat16 goes through a plain loop of XLA's."


class Form(NamedTuple):
    """A way to store weights and to multiply by them.

    Attributes:
        multiply: a function that takes rows [N, in] and a packed weight, and returns the product.
        pack: a function that takes a weight f32[in, out], and returns it in this form.
    """

    multiply: Callable[[Any, Any], Any]
    pack: Callable[[np.ndarray], Any] = jnp.asarray


def _blocks(columns: int, weight: np.ndarray) -> jax.Array:
    """Return a weight as blocks of columns, f32[out / columns, in, columns]."""
    return jnp.asarray(weight.reshape(len(weight), -1, columns).transpose(1, 0, 2).copy())


def _by_batch(x: jax.Array, blocks: jax.Array) -> jax.Array:
    y = jnp.matmul(jnp.broadcast_to(x, (len(blocks), *x.shape)), blocks)
    return y.transpose(1, 0, 2).reshape(len(x), -1)


def _in_bfloat16(x: jax.Array, weight: jax.Array) -> jax.Array:
    return jnp.matmul(x.astype(jnp.bfloat16), weight, preferred_element_type=jnp.float32)


FORMS = {
    "[in, out]": Form(jnp.matmul),
    "[out, in]": Form(
        lambda x, w: jnp.einsum("ni,oi->no", x, w), lambda w: jnp.asarray(w.T.copy())
    ),
    **{f"blocks of {n} columns": Form(_by_batch, partial(_blocks, n)) for n in (16, 32, 64)},
    "the engine's": Form(
        lambda x, weight: weight.multiply(x), lambda w: Dense(jnp.asarray(w)).on("cpu")
    ),
    "bfloat16, rows rounded too": Form(_in_bfloat16, partial(jnp.asarray, dtype=jnp.bfloat16)),
    "NumPy": Form(np.matmul, np.asarray),
}


def layers(form: Form, xp: Any, weights: Any, x: Any) -> Any:
    """Run rows x [N, WIDTH] through the products of all layers. `xp` is NumPy or jax.numpy."""

    def normed(x: Any) -> Any:
        return x / xp.sqrt((x * x).mean(-1, keepdims=True) + 1e-5)

    for qkv, out, gate_up, down in weights:
        x = x + form.multiply(form.multiply(normed(x), qkv)[:, :WIDTH], out)
        gate, up = xp.split(form.multiply(normed(x), gate_up), 2, axis=-1)
        x = x + form.multiply(gate / (1 + xp.exp(-gate)) * up, down)
    return x


def main() -> None:
    """Measure all forms in turn, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15, help="default: %(default)s")
    parser.add_argument("--result", default="few_rows_cpu", help="file; default: %(default)s")
    settings, source = parser.parse_args(), provenance()
    rng = np.random.default_rng(0)
    weights = [
        [rng.standard_normal((n, m), np.float32) / np.float32(n**0.5) for n, m in SHAPES]
        for _ in range(LAYERS)
    ]
    calls = {}
    for name, form in FORMS.items():
        packed = [tuple(map(form.pack, layer)) for layer in weights]
        for num_rows in ROWS:
            x = np.random.default_rng(num_rows).standard_normal((num_rows, WIDTH), np.float32)
            run = partial(layers, form, np if name == "NumPy" else jnp)
            if name != "NumPy":
                run = jax.jit(run).lower(packed, x).compile()
            expected = layers(FORMS["NumPy"], np, weights, x)
            error = np.abs(np.asarray(run(packed, x)) - expected).max() / np.abs(expected).max()
            assert error < (0.05 if "bfloat16" in name else 1e-4), (name, error)
            calls[name, num_rows] = partial(run, packed, x)
    times = {key: [] for key in calls}
    for _ in range(settings.rounds):
        for key, call in calls.items():
            jax.block_until_ready(call())
            start = time.perf_counter()
            for _ in range(CALLS):
                jax.block_until_ready(call())
            times[key].append((time.perf_counter() - start) / CALLS * 1e3)
    rows = []
    for name in FORMS:
        medians = [float(np.median(times[name, n])) for n in ROWS]
        ratio = medians[-1] / medians[0]
        rows.append([name, *(summary(times[name, n]) for n in ROWS), round(ratio, 2)])
        print(name, *(f"{one:.2f}" for one in medians), f"{ratio:.2f}", sep="\t")
    columns = ["form of weights", *(f"{n} rows" for n in ROWS), f"{ROWS[-1]} rows / 1"]
    result = {
        "title": "Products of few rows on a CPU",
        "description": "Milliseconds of the products of demo-llama's twelve layers, in float32.",
        "provenance": source,
        "settings": vars(settings),
        "tables": [
            {"title": "Forms of the weights", "columns": columns, "rows": rows, "notes": [NOTE]}
        ],
    }
    write_result(RESULTS / f"{settings.result}.json", result)


if __name__ == "__main__":
    main()
