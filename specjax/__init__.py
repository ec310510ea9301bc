"""Lossless speculative decoding in JAX."""

from specjax.checkpoint.errors import CheckpointError
from specjax.config import SpeculativeConfig
from specjax.llm import LLM
from specjax.request import CompletionOutput, RequestOutput, SamplingParams

__all__ = [
    "LLM",
    "CheckpointError",
    "CompletionOutput",
    "RequestOutput",
    "SamplingParams",
    "SpeculativeConfig",
]
