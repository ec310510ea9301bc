"""Options of an LLM as a dataclass, as in vLLM."""

from dataclasses import dataclass, field, fields, make_dataclass
from pathlib import Path
from typing import Any, get_type_hints

from specjax.device.models.model import Model
from specjax.serving.options import DEFAULTS, LLMOptions, read_options

_Options = make_dataclass(
    "_Options",
    [
        ("model", str | Path | Model),
        *(
            (name, kind, field(default=DEFAULTS[name]))
            for name, kind in get_type_hints(LLMOptions).items()
        ),
    ],
    init=False,
)


class EngineArgs(_Options):
    """The options of `LLM` as a dataclass, for `LLM(**asdict(EngineArgs(model=...)))`.

    Raises:
        TypeError: an option is unknown.
        ValueError: an option of vLLM is not supported and would change outputs, or an option was
            removed.
    """

    def __init__(self, model: str | Path | Model, **options: Any):
        defaults = {one.name: one.default for one in fields(self)}
        self.__dict__.update(read_options(options, defaults) | {"model": model})


@dataclass(init=False)
class AsyncEngineArgs(EngineArgs):
    """The options of `AsyncLLM`, for `AsyncLLM.from_engine_args`."""

    max_num_requests: int | None = None
    verbose: bool = False
