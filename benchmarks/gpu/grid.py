"""Measures steps of whole models in the engine, by batch size and K."""

from collections.abc import Iterator
from typing import Any

from engines import (
    Chosen,
    Models,
    free,
    make_config,
    make_engine,
    make_models,
    measure_engine,
    step_floor,
)
from seed import RATES, seed_figures
from steps import Step
from timing import Setting, attempt, step_times

FIRST_KS, OTHER_KS = (0, 3), (1, 5)
CPU_KS = (0, 1)  # few drafts, because each is compiled separately
COMPARED = (1, 64)  # batch sizes with more measurements than the grid
TAX_ROUNDS = 3
ROOM = 16  # more tokens per request than K = 3 needs, so that all engines have the same programs


def measure_grid(setting: Setting, batch: int) -> Iterator[dict[str, Any]]:
    """Yield the figures of one batch size for each K, the most informative K first.

    The figures can be compared with published figures, which the module `seed` has.
    """
    name = "Llama-3.1-8B"
    models = make_models(name, setting)
    row = {"what": "step", "model": name, "batch": batch}
    first = setting.pick(FIRST_KS, CPU_KS)
    policy = Chosen(first)
    engine = make_engine(models, batch, policy, RATES, setting, room=ROOM)
    yield from _cells(engine, policy, first, models, row, setting)
    if batch in COMPARED:
        yield attempt(
            row | {"what": "K=0 tax"}, lambda: measure_tax(models, engine, policy, setting)
        )
    if not setting.is_cpu:
        others = Chosen(OTHER_KS)
        engine.set_policy(others)
        yield from _cells(engine, others, OTHER_KS, models, row, setting)
    if batch in COMPARED:
        yield attempt(row | {"what": "drafts"}, lambda: measure_drafts(models, batch, setting))


def measure_models(
    setting: Setting, names: tuple[str, ...], batches: tuple[int, ...]
) -> Iterator[dict[str, Any]]:
    """Measure the models `names`, each with one engine per batch size and the same weights."""
    for name in names:
        yield from _measure_model(name, setting.pick(batches, (2,)), setting)


def _measure_model(
    name: str, batches: tuple[int, ...], setting: Setting
) -> Iterator[dict[str, Any]]:
    models = make_models(name, setting)
    for batch in batches:
        row = {"what": "step", "model": name, "batch": batch}
        ks = setting.pick(FIRST_KS, CPU_KS[1:])
        policy = Chosen(ks, k=max(ks))
        engine = make_engine(models, batch, policy, RATES, setting)
        yield from _cells(engine, policy, ks, models, row, setting)
        free(engine)


def _cells(
    engine: Any, policy: Chosen, ks: tuple[int, ...], models: Models, row: Any, setting: Setting
) -> Iterator[dict[str, Any]]:
    compile_seconds = engine.metrics().compile_seconds
    for k in ks:

        def one(k=k):
            found = measure_engine(engine, policy, k, setting)
            floor = step_floor(models, row["batch"], k, setting)
            figures = seed_figures(row["batch"], k) if row["model"].startswith("Llama") else {}
            gbps = floor / found["ms_per_step"] / 1e6
            return found | {"bytes": floor, "gbps": gbps} | figures

        yield attempt(row | {"k": k, "compile_seconds": compile_seconds}, one)


def measure_tax(models: Models, engine: Any, policy: Chosen, setting: Setting) -> dict[str, Any]:
    """Compare steps with K = 0 of an engine that has a drafter, and steps of a plain engine.

    The two engines take turns.
    """
    batch = engine.config.max_num_seqs
    plain_policy = Chosen((0,))
    plain = make_engine(models, batch, plain_policy, (), setting, is_plain=True, room=ROOM)
    pairs = [
        [
            measure_engine(one, its, 0, setting)["ms_per_step"]
            for one, its in ((engine, policy), (plain, plain_policy))
        ]
        for _ in range(setting.pick(TAX_ROUNDS, 1))
    ]
    free(plain)
    with_drafter, without = (min(ms) for ms in zip(*pairs, strict=True))
    return {
        "ms_with_drafter": with_drafter,
        "ms_without": without,
        "pairs": pairs,
        "ratio": with_drafter / without,
    }


def measure_drafts(models: Models, batch: int, setting: Setting) -> dict[str, Any]:
    """Measure a round's drafting alone, a round without drafts, and a full round."""
    most = max(setting.pick(FIRST_KS, CPU_KS))
    config, ms = make_config(batch, setting, most, room=ROOM), {}
    steps = ("target", 0, False), ("drafts", most, True), ("round", most, False)
    for name, k, only_drafts in steps:
        step = Step(models, config, k, RATES, setting, only_drafts=only_drafts, max_drafts=most)
        ms[name] = step_times(step.launch, setting)
        del step
    middle = {name: times["median"] for name, times in ms.items()}
    return {
        "k": most,
        "ms": ms,
        "ratio": middle["round"] / (middle["target"] + middle["drafts"]),
    }
