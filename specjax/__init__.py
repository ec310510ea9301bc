"""Lossless speculative decoding in JAX.

Names are imported at first use, so that `specjax --help` need not wait for JAX.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specjax.async_llm import AsyncLLM
    from specjax.checkpoint.errors import CheckpointError
    from specjax.config import SpeculativeConfig
    from specjax.engine_args import AsyncEngineArgs, EngineArgs
    from specjax.following import follow
    from specjax.llm import LLM
    from specjax.outputs import ChatMessage, CompletionOutput, Logprob, RequestOutput, ToolCall
    from specjax.ray.llm import RayLLM
    from specjax.sampling_params import (
        RequestOutputKind,
        SamplingParams,
        StructuredOutputs,
        StructuredOutputsParams,
    )
    from specjax.text.prompts import TextPrompt, TokensPrompt

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "AsyncEngineArgs",
    "AsyncLLM",
    "ChatMessage",
    "CheckpointError",
    "CompletionOutput",
    "EngineArgs",
    "Logprob",
    "RayLLM",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "SpeculativeConfig",
    "StructuredOutputs",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensPrompt",
    "ToolCall",
    "follow",
]

_MODULES = {
    "LLM": "specjax.llm",
    "AsyncLLM": "specjax.async_llm",
    "AsyncEngineArgs": "specjax.engine_args",
    "EngineArgs": "specjax.engine_args",
    "CheckpointError": "specjax.checkpoint.errors",
    "RayLLM": "specjax.ray.llm",
    "ChatMessage": "specjax.outputs",
    "CompletionOutput": "specjax.outputs",
    "RequestOutput": "specjax.outputs",
    "Logprob": "specjax.outputs",
    "ToolCall": "specjax.outputs",
    "RequestOutputKind": "specjax.sampling_params",
    "SamplingParams": "specjax.sampling_params",
    "StructuredOutputs": "specjax.sampling_params",
    "StructuredOutputsParams": "specjax.sampling_params",
    "TextPrompt": "specjax.text.prompts",
    "TokensPrompt": "specjax.text.prompts",
    "SpeculativeConfig": "specjax.config",
    "follow": "specjax.following",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_MODULES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
