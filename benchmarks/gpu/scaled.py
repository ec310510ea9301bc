"""Llama-3.1-8B's matmuls with matrices of 8 and 4 bits, with several tilings.

    python benchmarks/gpu/scaled.py --output FILE      on a card, within --seconds; a table last

A way to multiply is timed as one program, which multiplies by several matrices in turn, so that no
matrix is in the card's cache. The program's first product is compared with a product in float32.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # before jax is imported
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    os.environ.setdefault("XLA_FLAGS", "--xla_gpu_enable_command_buffer=")

import jax
import jax.numpy as jnp
from problems import normal
from projections import MATMULS
from threads import compile_all
from timing import Setting, attempt, kernel_times

from pallas_kernels.packed_matmul import FourBits
from pallas_kernels.packed_matmul.triton import packed_matmul_triton
from pallas_kernels.scaled_matmul import scaled_matmul
from pallas_kernels.scaled_matmul.triton import ScaledMatmulTuning as Tuning
from pallas_kernels.scaled_matmul.triton import choose_config, scaled_matmul_triton, with_splits
from specjax.engine.xla_options import GPU_OPTIONS

F8, GROUP = "float8_e4m3fn", 128
MAX_ROWS = 2048  # of x
BYTES = 2**28  # of a program's matrices together, several times the card's cache
MANY_ROWS = 64
# Rows, and the matmuls to time.
ROUNDS = ((1, MATMULS), (64, MATMULS), (512, ("gate_up", "down")), (32, MATMULS), (256, ("down",)))
ROUNDS += ((2048, ("gate_up", "down")), (8, MATMULS))
SAMPLES, LAUNCHES = 3, 20


@dataclass(frozen=True)
class Way:
    """A way to multiply: `call(x, *weights)`, where `form` tells how the weights are stored."""

    form: str  # "bf16", "block", "channel" or "int4"
    call: Callable[..., jax.Array]
    config: str = ""


@dataclass(frozen=True)
class Shape:
    """The data for one matrix shape: rows x, weights by form, and their products in float32."""

    part: str
    depth: int
    width: int
    x: list[jax.Array]  # [max_rows, depth]
    weights: Mapping[str, list[tuple[jax.Array, ...]]]
    truths: Mapping[str, jax.Array]


def tilings(rows: int, shape: Shape) -> dict[str, Tuning]:
    """Return the tilings to try, by name: those in use, and others."""
    if rows <= 16:
        found = {
            "three stages": Tuning(16, 64, 128, 1, 4, 3),
            "five stages": Tuning(16, 64, 128, 1, 4, 5),
            "unrolled": Tuning(16, 64, 128, 1, 4, 3, unroll=2),
            "eight warps": Tuning(16, 64, 128, 1, 8, 4),
            "two warps": Tuning(16, 64, 128, 1, 2, 4),
            "32 wide": Tuning(16, 32, 128, 1, 4, 4),
            "32 wide, two warps": Tuning(16, 32, 128, 1, 2, 4),
        }
    elif rows <= 32:
        found = {
            "128 wide": Tuning(32, 128, 128, 1, 4, 3),
            "eight warps": Tuning(32, 128, 128, 1, 8, 3),
        }
    elif rows <= 64:
        found = {
            "eight warps": Tuning(64, 128, 128, 1, 8, 3),
            "two stages": Tuning(64, 128, 128, 1, 4, 2),
            "64 deep": Tuning(64, 128, 64, 1, 4, 5),
            "256 wide": Tuning(64, 256, 128, 1, 8, 2),
            "256 wide, 64 deep": Tuning(64, 256, 64, 1, 8, 4),
        }
    else:
        found = {"64 deep": Tuning(128, 128, 64, 1, 8, 4)}
    sizes = rows, shape.width, shape.depth
    found = {name: with_splits(config, *sizes) for name, config in found.items()}
    used = choose_config(*sizes, "bfloat16")
    found = {"in use": used} | found
    if rows <= 16:
        for splits in {1, 2, 4, 8} - {used.num_splits}:
            found[f"{splits} splits"] = replace(used, num_splits=splits)
    return found


def ways(rows: int, shape: Shape, setting: Setting) -> dict[str, Way]:
    """Return the ways to multiply that will be timed, by name."""
    interpret = setting.is_cpu
    per_output = 1, shape.depth
    found = {"bf16": Way("bf16", jnp.matmul)}
    if rows > MANY_ROWS:  # each takes XLA seconds to tune
        found["xla"] = Way("block", partial(_xla, block=(GROUP, GROUP)))
    tried = dict([*tilings(rows, shape).items()][: setting.pick(None, 2)])
    for name, config in tried.items():
        call = partial(
            scaled_matmul_triton, block=(GROUP, GROUP), config=config, interpret=interpret
        )
        found[name] = Way("block", call, str(config))
    if rows > MANY_ROWS:
        return found
    config = tried["in use"]
    deep = replace(config, block_depth=256, num_stages=3)
    for name, tiles in {"channel": config, "channel, deep": deep}.items():
        call = partial(scaled_matmul_triton, block=per_output, config=tiles, interpret=interpret)
        found[name] = Way("channel", call, str(tiles))
    if rows <= 16:
        for name, stages in (("int4", 4), ("int4, six stages", 6)):
            tiles = replace(config, num_stages=stages)
            call = partial(_four_bits, config=tiles, interpret=interpret)
            found[name] = Way("int4", call, str(tiles))
    return found


def _xla(x: jax.Array, values: jax.Array, scales: jax.Array, *, block: Any) -> jax.Array:
    return scaled_matmul(x, values, scales, block, kernels="reference")


def _four_bits(x: jax.Array, values: jax.Array, scales: jax.Array, **options: Any) -> jax.Array:
    return packed_matmul_triton(x, values, scales, None, None, FourBits(GROUP), **options)


def make_shape(part: str, depth: int, width: int, max_rows: int = MAX_ROWS) -> Shape:
    """Make the matrices, and rows for each. Matrices in bf16 have no scales."""
    count = max(3, min(12, BYTES // (depth * width)))
    if depth * width < 2**16:
        count = 2

    def scales(seed: int, *shape: int) -> jax.Array:
        return 0.01 + 0.01 * jnp.abs(normal(seed, shape, "float32"))

    values = [normal(i, (width, depth), F8) for i in range(count)]
    blocks = -(-width // GROUP), -(-depth // GROUP)
    packed = [_packed(value) for value in values]
    weights = {
        "bf16": [(_transposed(v),) for v in values[: max(2, count // 2)]],
        "block": [(v, scales(100 + i, *blocks)) for i, v in enumerate(values)],
        "channel": [(v, scales(200 + i, width, 1)) for i, v in enumerate(values)],
        "int4": [
            (p, scales(300 + i, blocks[1], width).astype("bfloat16")) for i, p in enumerate(packed)
        ],
    }
    # Different rows for each, because XLA would merge products of the same rows.
    x = [normal(400 + i, (max_rows, depth), "bfloat16") for i in range(count)]
    truths = {form: _truth(form, x[0], *given[0]) for form, given in weights.items()}
    return Shape(part, depth, width, x, weights, truths)


@jax.jit
def _packed(values: jax.Array) -> jax.Array:
    numbers = jnp.clip(jnp.round(2 * values.astype(jnp.float32)), -8, 7)
    return FourBits(GROUP).pack((numbers + 8).astype(jnp.uint8))


@jax.jit
def _transposed(values: jax.Array) -> jax.Array:
    return values.astype(jnp.bfloat16).T


@partial(jax.jit, static_argnums=0)
def _truth(form: str, x: jax.Array, values: jax.Array, scales: jax.Array | None = None):
    x = x.astype(jnp.float32)
    if form == "bf16":
        matrix = values.astype(jnp.float32)
    elif form == "int4":
        groups = values.reshape(len(values), -1, GROUP // 2)
        numbers = jnp.concatenate([groups & 15, groups >> 4], -1).astype(jnp.float32) - 8
        by_group = scales.T[..., None].astype(jnp.float32)  # pyright: ignore
        matrix = (numbers * by_group).reshape(len(values), -1).T
    else:
        side = (GROUP, GROUP) if form == "block" else (1, x.shape[1])
        by_row = jnp.repeat(scales, side[0], 0)[: len(values)]
        matrix = (values.astype(jnp.float32) * jnp.repeat(by_row, side[1], 1)[:, : x.shape[1]]).T
    return jnp.matmul(x, matrix, precision="highest")


def time_scaled(setting: Setting, *, seconds: float = 140.0) -> Iterator[dict[str, Any]]:
    """Time the ways to multiply (`ways`) for the shapes in `ROUNDS`, for up to `seconds`."""
    start = time.monotonic()
    matmuls = setting.pick(MATMULS, {"tiny": (256, 192)})
    shapes = [
        make_shape(part, *sizes, setting.pick(MAX_ROWS, 80)) for part, sizes in matmuls.items()
    ]
    for rows, parts in setting.pick(ROUNDS, ((2, ("tiny",)), (70, ("tiny",)))):
        todo = [
            (shape, name, way)
            for shape in shapes
            if shape.part in parts
            for name, way in ways(rows, shape, setting).items()
        ]
        programs = compile_all([partial(_compile, rows, *one, setting) for one in todo])
        made = list(zip(todo, list(programs), strict=True))
        for (shape, name, way), program in made:
            if time.monotonic() - start > seconds:
                return
            row = {"what": "scaled_matmul tiles", "part": shape.part, "rows": rows, "way": name}
            row |= {"form": way.form, "config": way.config}
            yield attempt(row, partial(_time, rows, shape, way, program, setting)) | {
                "at": round(time.monotonic() - start, 1)
            }


def _given(rows: int, shape: Shape, way: Way) -> tuple[Any, Any]:
    weights = shape.weights[way.form]
    return [x[:rows] for x in shape.x[: len(weights)]], weights


def _compile(rows: int, shape: Shape, name: str, way: Way, setting: Setting) -> Callable[..., Any]:
    one = jax.jit(way.call)  # a single trace

    def run(x, weights):
        return [one(rows, *given) for rows, given in zip(x, weights, strict=True)]

    options = {} if setting.is_cpu else dict(GPU_OPTIONS)
    return jax.jit(run).lower(*_given(rows, shape, way)).compile(compiler_options=options)


def _time(
    rows: int, shape: Shape, way: Way, compiled: Callable[[], Any], setting: Setting
) -> dict[str, Any]:
    run, given = compiled(), _given(rows, shape, way)
    out = run(*given)
    truth = shape.truths[way.form][:rows]
    error = jnp.linalg.norm(out[0].astype(jnp.float32) - truth) / jnp.linalg.norm(truth)
    if not error < 0.01:
        raise ArithmeticError(f"differs by {float(error)}")
    found: dict[str, Any] = {"difference": float(error)}
    walls = []
    for _ in range(setting.pick(SAMPLES, 1)):
        begin = time.perf_counter()
        for _ in range(setting.pick(LAUNCHES, 1)):
            out = run(*given)
        jax.block_until_ready(out)
        walls.append((time.perf_counter() - begin) / setting.pick(LAUNCHES, 1))
    calls = len(given[1])
    found["wall_us"] = min(walls) * 1e6 / calls
    kernels, why_not = kernel_times(lambda: run(*given), setting)
    us = found["wall_us"]
    if kernels:
        us = found["device_us"] = sum(kernels.values()) * 1e6 / calls
        found["kernels_us"] = {name: seconds * 1e6 / calls for name, seconds in kernels.items()}
    else:
        found["no_device_time"] = why_not
    num_bytes = sum(x.nbytes for x in given[1][0]) + 2 * rows * (shape.depth + shape.width)
    return found | {"us": us, "bytes": num_bytes, "gbps": num_bytes / us / 1e3}


def table(rows: list[dict[str, Any]]) -> str:
    """Return a line per matmul and number of rows.

    A line has the microseconds of each way to multiply, and the fastest way of each form.
    """
    lines = []
    for key in dict.fromkeys((x["rows"], x["part"]) for x in rows):
        own = [x for x in rows if (x["rows"], x["part"]) == key]
        cells = [f"{x['way']} {x['us']:.1f}" if "us" in x else f"{x['way']} FAILED" for x in own]
        good = [x for x in own if "us" in x]
        best = [
            min((x for x in good if x["form"] == form), key=lambda x: x["us"])
            for form in ("block", "channel", "int4")
            if any(x["form"] == form for x in good)
        ]
        fastest = ", ".join(f"{x['form']}: {x['way']} {x['gbps']:.0f} GB/s" for x in best)
        lines.append(f"{key[0]} {key[1]} | {' | '.join(cells)} || {fastest}")
    return "\n".join(lines)


def main() -> None:
    """Run on a card, or with --cpu tiny shapes by interpretation."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=140.0)
    parser.add_argument("--cpu", action="store_true")
    settings = parser.parse_args()
    if settings.cpu:
        jax.config.update("jax_platforms", "cpu")
    settings.output.parent.mkdir(parents=True, exist_ok=True)
    rows = []
    print(jax.__version__, jax.devices()[0].device_kind, flush=True)
    with settings.output.open("a") as file:
        for row in time_scaled(Setting(is_cpu=settings.cpu), seconds=settings.seconds):
            file.write(json.dumps(row, default=float) + "\n")
            file.flush()
            said = row.get("error") or f"{row['us']:8.2f} us {row['gbps']:6.0f} GB/s"
            about = f"{row['at']:6.1f} s {row['rows']:3} {row['part']:8} {row['way']:22}"
            print(about, said, flush=True)
            rows.append(row)
        print(table(rows))


if __name__ == "__main__":
    main()
