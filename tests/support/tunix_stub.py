"""The parts of Tunix that the adapter needs, for tests without Tunix."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file
from support.engines import SIZES
from support.logits import hf_logits
from support.rollouts import log_softmax

from specjax.rl.tunix import TunixRollout

LETTERS = " abcdefghijklmnopqrstuvwxyz!?.~$"  # the vocabulary of the tiny targets
BOS, PAD, EOS = (LETTERS.index(letter) for letter in "!~$")
HEAD_DIM = 8  # of the tiny targets


@dataclass(frozen=True)
class Config:
    """The fields of Tunix's RolloutConfig that the adapter reads, with Tunix's defaults."""

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
    """Tunix's modes of rollouts."""

    TRAIN = "train"
    EVAL = "eval"


class Letters:
    """A tokenizer with the methods that Tunix expects. Each of `LETTERS` is a token."""

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


def made(
    target: Any, config: Any = CONFIG, *, sizes: Mapping[str, Any] = SIZES, **options: Any
) -> TunixRollout:
    """Return a `TunixRollout` with the sizes of all tests, without a rollout actor."""
    given = {"rollout_actor": None, "tokenizer": Letters(), "mesh": None, "model": target.folder}
    return TunixRollout(rollout_config=config, **given | {**sizes} | options)


def reference_logps(target: Any, prompt: list[int], tokens: list[int], temperature: float) -> Any:
    """Return the log-probability f32[T] of each token, computed by transformers in float32."""
    logits = hf_logits(target.hf, [[*prompt, *tokens]])[0, len(prompt) - 1 : -1]
    return log_softmax(logits / temperature)[np.arange(len(tokens)), tokens]


def tunix_tree(folder: Path) -> dict[Any, Any]:
    """Return a checkpoint's tensors in Tunix's form, without using our rules for names."""
    tree: dict[Any, Any] = {}

    def put(path: Sequence[Any], array: np.ndarray) -> None:
        node = tree
        for key in path[:-1]:
            node = node.setdefault(key, {})
        node[path[-1]] = array

    for name, x in load_file(folder / "model.safetensors").items():
        match name.removeprefix("model.").split("."):
            case ["embed_tokens", "weight"]:
                put(("embedder", "input_embedding"), x)
            case ["norm", "weight"]:
                put(("final_norm", "w"), x)
            case ["lm_head", "weight"]:
                put(("lm_head", "w"), x.T)
            case ["layers", i, "self_attn", "o_proj", "weight"]:
                heads = np.stack(np.split(x, x.shape[1] // HEAD_DIM, axis=1))
                put(("layers", int(i), "attn", "o_proj", "w"), heads.transpose(0, 2, 1))
            case ["layers", i, "self_attn", ("q_proj" | "k_proj" | "v_proj") as kind, "weight"]:
                heads = np.stack(np.split(x, len(x) // HEAD_DIM))
                put(("layers", int(i), "attn", kind, "w"), heads.transpose(2, 0, 1))
            case ["layers", i, "self_attn", kind, "bias"]:
                put(("layers", int(i), "attn", f"{kind[0]}_bias"), x)
            case ["layers", i, "self_attn", kind, "weight"]:  # norms
                put(("layers", int(i), "attn", kind, "w"), x)
            case ["layers", i, "mlp", kind, "weight"]:
                put(("layers", int(i), "mlp", kind, "kernel"), x.T)
            case ["layers", i, kind, "weight"]:
                put(("layers", int(i), kind, "w"), x)
    return tree
