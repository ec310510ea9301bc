"""What an LLM is, on one line."""

from specjax.device.drafters.drafter import NoDrafter
from specjax.engine.engine import Engine

SIZES = "max_num_seqs", "max_model_len", "num_pages", "page_size"


def describe(model: str, engine: Engine | None) -> str:
    """Return the `repr` of an LLM: model, dtype, drafter and its K, sizes; no engine is closed."""
    if engine is None:
        return f"LLM({model!r}, closed)"
    parts = [repr(model), f"dtype={engine.config.dtype!r}"]
    if not isinstance(engine.drafter, NoDrafter):
        ks = " or ".join(map(str, sorted(engine.scheduler.policy.choices)))
        parts += [f"drafter={type(engine.drafter).__name__}", f"K={ks}"]
    parts += [f"{name}={getattr(engine.config, name)}" for name in SIZES]
    return f"LLM({', '.join(parts)})"
