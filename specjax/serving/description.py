"""Describes an LLM in one line."""

from specjax.engine.engine import Engine

SIZES = "max_num_seqs", "max_model_len", "num_pages", "page_size"


def describe(model: str | type, method: str | None, engine: Engine | None) -> str:
    """Return the `repr` of an LLM, which shows its model, dtype, method, K and sizes.

    Args:
        model: name of the checkpoint, or class of the `Model` value.
        method: drafting method; None without speculation.
        engine: engine of the LLM; None if the LLM is closed.
    """
    name = repr(model) if isinstance(model, str) else model.__name__
    if engine is None:
        return f"LLM({name}, closed)"
    parts = [name, f"dtype={engine.config.dtype!r}"]
    if method is not None:
        ks = " or ".join(map(str, sorted(engine.engines[0].scheduler.policy.choices)))
        parts += [f"method={method!r}", f"K={ks}"]
    parts += [f"{name}={getattr(engine.config, name)}" for name in SIZES]
    if len(engine.engines) > 1:
        parts.append(f"data_parallel_size={len(engine.engines)}")
    return f"LLM({', '.join(parts)})"
