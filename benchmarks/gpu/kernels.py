"""Times each kernel at the shapes of real models, with the default tiles and with others."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import jax.numpy as jnp
from problems import (
    ATTENTION_HEADS,
    DELTA_HEADS,
    LATENT_HEADS,
    ROUTES,
    TINY_ATTENTION,
    TINY_HEADS,
    TINY_LATENT,
    TINY_ROUTES,
    Problem,
    add_norm,
    attention,
    delta_rule,
    draws,
    experts,
    latents,
    pool,
    rotation,
    routes,
    truncation,
)
from snapshots import snapshot_rule
from timing import Setting, attempt, measure

from pallas_kernels.gated_delta_rule.triton.tuning import choose_tuning
from pallas_kernels.paged_attention.tuning import choose_config

POOL_BYTES = 5 * 2**30  # as in an engine, 32 bits cannot address the pool
DTYPE = "bfloat16"


def time_problem(problem: Problem, setting: Setting, config: Any = None) -> dict[str, Any]:
    """Return the times of a problem's calls, which donate the problem's state."""
    launch = problem.launcher(setting.kernels, config)
    calls = len(problem.items)
    return measure(launch, setting, calls=calls, num_bytes=problem.num_bytes)


def time_attention(setting: Setting) -> Iterator[dict[str, Any]]:
    """Time paged attention. The first shape is 64 requests of 4,096 tokens."""
    models = setting.pick(ATTENTION_HEADS, {"tiny": TINY_ATTENTION})
    pools = {name: pool(heads, setting.pick(POOL_BYTES, 2**18), DTYPE) for name, heads in
             models.items()}  # fmt: skip
    shapes = setting.pick(
        [(64, 4096), (1, 4096), (16, 4096), (64, 512), (256, 512), (1, 16384), (256, 4096)]
        + [(16, 16384), (1, 512), (16, 512), (64, 16384)],
        [(2, 64)],
    )

    def make(model: str, batch: int, rows: int, context: int) -> Problem:
        kv = jnp.copy(pools[model])  # the program consumes the copy
        return attention(models[model], batch, rows, context, DTYPE, kv)

    def timed(model: str, batch: int, rows: int, context: int) -> dict[str, Any]:
        row = _row("paged_attention", model, batch, rows, context=context)
        return attempt(row, lambda: time_problem(make(model, batch, rows, context), setting))

    for batch, context in shapes:
        for model in models:
            yield from (timed(model, batch, rows, context) for rows in (1, 4))


def time_tiles(setting: Setting) -> Iterator[dict[str, Any]]:
    """Time paged attention with the default tiles, and with other tiles."""
    models = setting.pick(ATTENTION_HEADS, {"tiny": TINY_ATTENTION})
    for model, heads in models.items():
        kv = pool(heads, setting.pick(POOL_BYTES, 2**18), DTYPE)
        for batch, rows, context in setting.pick(
            [(64, 4, 4096), (64, 1, 4096), (256, 1, 512), (16, 4, 4096), (1, 4, 4096)],
            [(2, 1, 64)],
        ):

            def make(heads=heads, kv=kv, batch=batch, rows=rows, context=context):
                return attention(heads, batch, rows, context, DTYPE, jnp.copy(kv))

            base = choose_config(batch, rows, *heads, context, jnp.dtype(DTYPE))
            others = [
                replace(base, block_tokens=tokens, num_stages=stages)
                for tokens in setting.pick((16, 32, 64), (16,))
                for stages in setting.pick((3, 5, 7), (5,))
            ]
            others += [
                replace(base, num_splits=splits)
                for splits in (max(1, base.num_splits // 2), min(64, 2 * base.num_splits))
            ]
            row = _row("paged_attention", model, batch, rows, context=context)
            yield from tune(row, make, base, others, setting)


def time_delta_rule(setting: Setting) -> Iterator[dict[str, Any]]:
    """Time the gated delta rule, and the same recurrence with a state kept after every token."""
    models = setting.pick(DELTA_HEADS, {"tiny": TINY_HEADS})
    for batch in setting.pick((64, 1, 256, 16), (2,)):
        for model, heads in models.items():
            for rows in setting.pick((1, 4), (2,)):
                row = _row("gated_delta_rule", model, batch, rows)
                make = partial(delta_rule, heads, batch, rows, DTYPE, layers=setting.pick(0, 2))
                yield attempt(row, lambda make=make: time_problem(make(), setting))
                row = row | {"what": "snapshots"}
                make = partial(snapshot_rule, heads, batch, rows)
                if rows > 1:
                    yield attempt(row, lambda make=make: time_problem(make(), setting))


def time_delta_rule_tiles(setting: Setting) -> Iterator[dict[str, Any]]:
    """Time steps of the gated delta rule with other tiles.

    The tiles differ in the rows of a state per program and in the number of warps. For the kernel
    that prepares the inputs of new tokens, they differ in the tokens per program.
    """
    heads = setting.pick(DELTA_HEADS["27B"], TINY_HEADS)
    tiles = [(32, 32, 4), (32, 16, 2), (32, 16, 4), (32, 32, 8), (32, 64, 4), (32, 64, 8)]
    tiles += [(32, 8, 1), (16, 32, 4), (16, 16, 2), (64, 32, 4)]
    inputs = [(1, 1), (1, 2), (1, 4), (8, 1), (8, 2), (8, 4)]
    shapes = [(batch, rows) for rows in (4, 1, 6) for batch in (64, 1, 16, 256)]
    for batch, rows in setting.pick(shapes, [(2, 2)]):
        base = choose_tuning(batch)
        others = [
            replace(base, piece=piece, values=values, num_warps=warps)
            for piece, values, warps in setting.pick(tiles, tiles[:1])
        ]
        others += [replace(base, fold_tokens=tokens) for tokens in setting.pick((1, 2, 4), ())]
        others += [
            replace(base, inputs_tokens=tokens, inputs_warps=warps)
            for tokens, warps in setting.pick(inputs if rows == 4 else [], inputs[-1:])
        ]
        row = _row("gated_delta_rule", "27B", batch, rows)
        make = partial(delta_rule, heads, batch, rows, DTYPE, layers=setting.pick(0, 2))
        yield from tune(row, make, base, others, setting)


def tune(
    row: dict[str, Any], make: Any, base: Any, others: Iterable[Any], setting: Setting
) -> Iterator[dict[str, Any]]:
    """Yield a result for each config, and last the config with the highest bandwidth.

    `make` makes the problem to time, and `base` is the default config.
    """
    times = {}
    for config in (base, *dict.fromkeys(others)):
        if config == base and times:
            continue
        found = attempt({}, lambda config=config: time_problem(make(), setting, config))
        times[str(config)] = found.get("gbps", 0.0)
        yield row | {"what": f"{row['what']} tiles", "config": str(config)} | found
    best = max(times, key=lambda name: times[name])
    yield row | {
        "what": f"{row['what']} best tiles",
        "config": best,
        "default": str(base),
        "speedup": times[best] / times[str(base)] if times[str(base)] else None,
    }


def time_latents(setting: Setting) -> Iterator[dict[str, Any]]:
    """Time latent attention at the shapes of rounds and of a prefill chunk."""
    for model, heads in setting.pick(LATENT_HEADS, {"tiny": TINY_LATENT}).items():
        for batch, rows, context in setting.pick(
            ((64, 4, 2048), (1, 4, 4096), (8, 2, 4096), (1, 512, 1024)), ((2, 2, 40),)
        ):
            row = _row("latent_attention", model, batch, rows, context=context)
            make = partial(latents, heads, batch, rows, context, DTYPE)
            yield attempt(row, lambda make=make: time_problem(make(), setting))


def time_others(setting: Setting) -> Iterator[dict[str, Any]]:
    """Time the smaller kernels of a step.

    Their data comes from the card's cache, as in a step, so GB/s may exceed the memory's bandwidth.
    """
    for model, heads in setting.pick(ATTENTION_HEADS, {"tiny": TINY_ATTENTION}).items():
        for batch, rows in setting.pick(((1, 4), (64, 1), (64, 4), (256, 4)), ((2, 2),)):
            row = _row("rope_write", model, batch, rows)
            make = partial(rotation, heads, batch, rows, DTYPE)
            yield attempt(row, lambda make=make: time_problem(make(), setting))
    for num_rows, dim in setting.pick(
        ((8, 4096), (64, 4096), (256, 4096), (8, 5120), (256, 5120)), ((4, 64),)
    ):
        row = {"what": "add_rms_norm", "rows": num_rows, "dim": dim}
        make = partial(add_norm, num_rows, dim, DTYPE)
        yield attempt(row, lambda make=make: time_problem(make(), setting))
    for tokens in setting.pick((1, 8, 64, 256, 2048), (4,)):
        parts = {
            "gate_up": (2048, 1024),
            "down": (512, 2048),
        }
        for part, shape in setting.pick(parts, {"tiny": (32, 32)}).items():
            row = {"what": "grouped_matmul", "model": "Qwen3.5-35B-A3B", "part": part}
            make = partial(experts, tokens, setting.pick((256, 8), (4, 2)), *shape, DTYPE)
            yield attempt(row | {"tokens": tokens}, lambda make=make: time_problem(make(), setting))
    for model, sizes in setting.pick(ROUTES, {"tiny": TINY_ROUTES}).items():
        for rows in setting.pick((1, 8, 16), (4,)):
            row = {"what": "route", "model": model, "rows": rows}
            make = partial(routes, rows, sizes, "float32" if sizes[2].is_sigmoid else DTYPE)
            yield attempt(row, lambda make=make: time_problem(make(), setting))
    for rows in setting.pick((1, 16, 64, 256), (2,)):
        for what, problem in ("truncation", truncation), ("draw_tokens", draws):
            make = partial(problem, rows, setting.pick(151936, 300))
            row = {"what": what, "rows": rows}
            yield attempt(row, lambda make=make: time_problem(make(), setting))


def _row(what: str, model: str, batch: int, rows: int, **others: Any) -> dict[str, Any]:
    return {"what": what, "model": model, "batch": batch, "rows": rows} | others
