"""What an LLM is, on one line."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specjax.config import SpeculativeConfig
from specjax.device.models.model import Model
from specjax.engine.engine import Engine

SIZES = "max_num_seqs", "max_model_len", "num_pages", "page_size"


def describe(
    model: str | Path | Model,
    speculation: SpeculativeConfig | Mapping[str, Any] | None,
    engine: Engine | None,
) -> str:
    """Return the `repr` of an LLM: model, dtype, method and K, sizes; its engine is None if it is
    closed."""
    parts = [repr(str(model)) if isinstance(model, str | Path) else type(model).__name__]
    if engine is None:
        return f"LLM({parts[0]}, closed)"
    parts.append(f"dtype={engine.config.dtype!r}")
    if speculation is not None:
        ks = " or ".join(map(str, sorted(engine.scheduler.policy.choices)))
        parts += [f"method={SpeculativeConfig.of(speculation).method!r}", f"K={ks}"]
    parts += [f"{name}={getattr(engine.config, name)}" for name in SIZES]
    return f"LLM({', '.join(parts)})"
