"""What of Tunix the adapter meets: its config and a tokenizer, where Tunix is not installed."""

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import numpy as np
from support.engines import SIZES

LETTERS = " abcdefghijklmnopqrstuvwxyz!?.~$"  # the vocabulary of the tiny targets
BOS, PAD, EOS = (LETTERS.index(letter) for letter in "!~$")
OPTIONS = SIZES


@dataclass(frozen=True)
class Config:
    """The fields of Tunix's RolloutConfig that matter here, with its defaults."""

    max_tokens_to_generate: int = 64
    temperature: float = 0.9
    top_p: float | None = 1.0
    top_k: int | None = None
    seed: Any = None
    max_prompt_length: int = 64
    kv_cache_size: int = 1024
    data_type: Any = None
    eos_tokens: list[int] | None = None
    rollout_mapping_config: Any = None
    tensor_parallel_size: int = -1
    data_parallel_size: int = -1
    expert_parallel_size: int = 1
    return_logprobs: bool = False
    rollout_vllm_hbm_utilization: float = 0.2
    rollout_vllm_kwargs: dict[str, Any] = field(default_factory=dict)
    rollout_sglang_jax_page_size: int = 128


CONFIG = Config(max_tokens_to_generate=12, max_prompt_length=16, return_logprobs=True)


class Mode(Enum):
    """Tunix's modes."""

    TRAIN = "train"
    EVAL = "eval"


class Letters:
    """A tokenizer with Tunix's methods, a token for each of `LETTERS`."""

    def __init__(self, bos: int | None = None, pad: int = PAD):
        self.bos, self.pad = bos, pad

    def encode(self, text: str) -> list[int]:
        return [LETTERS.index(letter) for letter in text]

    def decode(self, ids: list[int]) -> str:
        return "".join(LETTERS[i] for i in ids)

    def bos_id(self) -> int | None:
        return self.bos

    def eos_id(self) -> int:
        return EOS

    def pad_id(self) -> int:
        return self.pad


def reference_logps(target: Any, prompt: list[int], tokens: list[int], temperature: float) -> Any:
    """Log-probabilities f32[T] of each token, by transformers in fp32."""
    import torch

    ids = torch.tensor([[*prompt, *tokens]])
    with torch.no_grad():
        logits = target.hf(ids).logits[0, len(prompt) - 1 : -1] / temperature
    chosen = torch.log_softmax(logits, -1)[torch.arange(len(tokens)), torch.tensor(tokens)]
    return np.asarray(chosen.numpy())
