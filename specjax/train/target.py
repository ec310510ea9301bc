"""Trains a small target model from scratch, by next-token cross-entropy on packed rows."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from pallas_kernels.gated_delta_rule import Heads
from specjax.checkpoint.spec import TensorSpec
from specjax.device.cache.latent import LatentAttention
from specjax.device.models import deepseek_v3, llama, qwen3_5
from specjax.device.models.deepseek_v3 import DeepSeek
from specjax.device.models.layers.moe import Experts
from specjax.device.models.layers.rope import Rope
from specjax.device.models.layers.router import SigmoidRouter
from specjax.device.models.llama import Llama
from specjax.device.models.model import Model
from specjax.device.models.qwen3_5 import ATTENTION, DELTA, Qwen35
from specjax.train.context import CausalRows
from specjax.train.data import Document, packed_rows
from specjax.train.loop import Schedule, fit


def demo_llama(vocab_size: int, num_layers: int, hidden_size: int) -> Llama:
    """Return a Llama with heads of width 64 and three query heads per key-value head."""
    heads = hidden_size // 64
    return Llama(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=hidden_size * 8 // 3,
        num_layers=num_layers,
        num_heads=heads,
        num_kv_heads=max(1, heads // 3),
        head_dim=64,
        rms_norm_eps=1e-5,
        rope=Rope(head_dim=64),
        max_position=2048,
    )


def demo_qwen3_5(vocab_size: int, num_layers: int, hidden_size: int) -> Qwen35:
    """Return a hybrid model with heads of width 64.

    Every fourth layer has attention. The other layers have gated delta rules with two value heads
    per key head.
    """
    heads = hidden_size // 64
    return Qwen35(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=hidden_size * 13 // 6,
        layer_types=tuple(DELTA if (i + 1) % 4 else ATTENTION for i in range(num_layers)),
        num_heads=heads,
        num_kv_heads=max(1, heads // 3),
        head_dim=64,
        delta_heads=Heads(max(1, heads // 2), 2 * max(1, heads // 2), 64, 64),
        conv_width=4,
        rms_norm_eps=1e-6,
        rope=Rope(head_dim=16),
        max_position=2048,
        num_mtp_layers=1,
    )


def demo_glm4_moe_lite(vocab_size: int, num_layers: int, hidden_size: int) -> DeepSeek:
    """Return a decoder with latent attention, and with experts in all layers but the first."""
    heads, inner = hidden_size // 64, hidden_size // 2
    return DeepSeek(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=hidden_size * 8 // 3,
        num_layers=num_layers,
        attention=LatentAttention(
            num_layers=num_layers,
            num_heads=heads,
            rank=64,
            nope_dim=48,
            rope_dim=16,
            value_dim=64,
            scale=64**-0.5,
            is_interleaved=True,
        ),
        q_rank=None,
        rms_norm_eps=1e-5,
        rope=Rope(head_dim=16),
        max_position=2048,
        experts=Experts(
            num_experts=8,
            num_chosen=2,
            intermediate_size=inner,
            shared_intermediate_size=inner,
            router=SigmoidRouter(scaling=1.8),
            shared_name="shared_experts",
        ),
        dense_layers=(0,),
        num_mtp_layers=1,
    )


class Demo(NamedTuple):
    """An architecture of demo models."""

    make: Callable[[int, int, int], Any]  # takes vocabulary size, number of layers and width
    to_hf: Callable[[Any], Mapping[str, Any]]  # returns its Hugging Face `config.json`


# Architectures by the value of --architecture.
DEMOS = {
    "llama": Demo(demo_llama, llama.to_hf),
    "qwen3_5": Demo(demo_qwen3_5, qwen3_5.to_hf),
    "glm4_moe_lite": Demo(demo_glm4_moe_lite, deepseek_v3.to_hf),
}


def init_params(specs: Any, key: jax.Array) -> Any:
    """Return initial f32 weights for a tree of `TensorSpec`.

    Norms are one and biases are zero. Matrices are normal with standard deviation 1 / sqrt(fan in),
    and embeddings are normal with standard deviation 0.02. The decay rates of gated delta rule
    heads are as in Mamba-2.
    """
    leaves, tree = jax.tree.flatten(specs)
    keys = jax.random.split(key, len(leaves))
    return jax.tree.unflatten(tree, [_init(s, k) for s, k in zip(leaves, keys, strict=True)])


def _init(spec: TensorSpec, key: jax.Array) -> jax.Array:
    if spec.fill is not None:
        return jnp.full(spec.shape, spec.fill, jnp.float32)
    if spec.names[0].endswith("A_log"):
        return jnp.log(jnp.linspace(1.0, 16.0, spec.shape[0]))
    if spec.names[0].endswith("dt_bias"):  # softplus gives 0.001 to 0.1
        return jnp.log(jnp.expm1(jnp.logspace(-3.0, -1.0, spec.shape[0])))
    if len(spec.shape) == 1:
        return jnp.zeros(spec.shape) if "bias" in spec.names[0] else jnp.ones(spec.shape)
    fan_in = spec.shape[-2 if spec.transpose else -1]
    scale = 0.02 if "embed" in spec.names[0] else fan_in**-0.5
    return scale * jax.random.normal(key, spec.shape)


def next_token_loss(model: Model, params: Any, rows: jax.Array) -> jax.Array:
    """Return the mean next-token cross-entropy (nats) of rows i32[B, T + 1]."""
    batch, length = rows.shape[0], rows.shape[1] - 1
    features, _ = model.extend(params, rows[:, :-1].reshape(-1), CausalRows.of(batch, length), None)
    logits = model.logits(params, features.hidden)
    return optax.softmax_cross_entropy_with_integer_labels(logits, rows[:, 1:].reshape(-1)).mean()


def evaluate(model: Model, params: Any, documents: Sequence[Document], length: int) -> float:
    """Return the held-out loss (nats per token) over one epoch of packed rows."""
    loss = jax.jit(lambda params, rows: next_token_loss(model, params, rows))
    total = sum(len(document.tokens) for document in documents)
    steps = max(1, (total - 1) // (8 * length))
    rows = (jnp.array(packed_rows(documents, step, 8, length, 0)) for step in range(steps))
    return float(np.mean([loss(params, row) for row in rows]))


def matrix_labels(params: Any) -> Any:
    """Return the label of each array for `muon_and_adamw`.

    It is "muon" for matrices whose sides are both longer than 8, else "adamw".
    """
    return jax.tree.map(lambda p: "muon" if p.ndim == 2 and min(p.shape) > 8 else "adamw", params)


def train_target(
    model: Model,
    documents: Sequence[Document],
    directory: Path,
    schedule: Schedule,
) -> tuple[Any, list[dict[str, float]]]:
    """Train `model` on `documents`; return its parameters and the log of metrics.

    Checkpoints are saved in `directory`, and a killed run resumes from them.
    """
    params = init_params(model.specs(), jax.random.key(schedule.seed))
    labels = replace(jax.tree.map(lambda _: "adamw", params), layers=matrix_labels(params.layers))
    return fit(
        params,
        None,
        labels,
        lambda params, frozen, rows, key: (next_token_loss(model, params, rows), {}),
        lambda step: jnp.array(
            packed_rows(documents, step, schedule.batch_size, schedule.length, schedule.seed)
        ),
        directory,
        schedule,
    )
