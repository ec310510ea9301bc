"""Options of an LLM as a value, for scripts that keep them apart from the engine."""

import inspect
from dataclasses import MISSING, dataclass, field, fields, make_dataclass
from pathlib import Path
from typing import Any

from specjax.config import refuse_unknown
from specjax.device.models.model import Model
from specjax.llm import LLM
from specjax.serving.vllm_options import take_vllm_options

_Options = make_dataclass(
    "_Options",
    [
        (p.name, p.annotation, field(default=MISSING if p.default is p.empty else p.default))
        for p in inspect.signature(LLM).parameters.values()
        if p.kind is not p.VAR_KEYWORD
    ],
    init=False,
)


class EngineArgs(_Options):
    """The options of `LLM`, as a dataclass: `LLM(**asdict(EngineArgs(model=...)))`.

    Raises:
        TypeError: an option that there is not.
        ValueError: one of vLLM's that would change what comes out, or one that was removed.
    """

    def __init__(self, model: str | Path | Model, **options: Any):
        options = take_vllm_options(options)
        known = {f.name: f.default for f in fields(self)}
        refuse_unknown({name: options[name] for name in options if name not in known}, known)
        self.__dict__.update(known | {"model": model} | options)


@dataclass(init=False)
class AsyncEngineArgs(EngineArgs):
    """The options of `AsyncLLM`, for `AsyncLLM.from_engine_args`."""

    max_num_requests: int | None = None
    verbose: bool = False
