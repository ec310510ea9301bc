"""A small target model trained from scratch: next-token cross-entropy on packed rows."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from specjax.checkpoint.spec import TensorSpec
from specjax.device.models.layers.rope import Rope
from specjax.device.models.llama import Llama, Params
from specjax.train.context import CausalRows
from specjax.train.data import Document, packed_rows
from specjax.train.loop import Schedule, fit


def demo_model(vocab_size: int, num_layers: int, hidden_size: int) -> Llama:
    """A Llama of the given depth and width, with 64-wide heads in groups of three."""
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


def init_params(specs: Any, key: jax.Array) -> Any:
    """f32 weights for a tree of `TensorSpec`: norms one, biases zero, matrices normal with the
    usual 1 / sqrt(fan in)."""
    leaves, tree = jax.tree.flatten(specs)
    keys = jax.random.split(key, len(leaves))
    return jax.tree.unflatten(tree, [_init(s, k) for s, k in zip(leaves, keys, strict=True)])


def _init(spec: TensorSpec, key: jax.Array) -> jax.Array:
    if len(spec.shape) == 1:
        return jnp.zeros(spec.shape) if "bias" in spec.names[0] else jnp.ones(spec.shape)
    scale = 0.02 if "embed" in spec.names[0] else spec.shape[0] ** -0.5
    return scale * jax.random.normal(key, spec.shape)


def next_token_loss(model: Llama, params: Params, rows: jax.Array) -> jax.Array:
    """Mean cross-entropy (nats) of tokens 1.. given those before, for rows i32[B, T + 1]."""
    batch, length = rows.shape[0], rows.shape[1] - 1
    features, _ = model.extend(params, rows[:, :-1].reshape(-1), CausalRows.of(batch, length), None)
    logits = model.logits(params, features.hidden)
    return optax.softmax_cross_entropy_with_integer_labels(logits, rows[:, 1:].reshape(-1)).mean()


def evaluate(model: Llama, params: Params, documents: Sequence[Document], length: int) -> float:
    """Held-out loss (nats per token) over one epoch of packed rows."""
    loss = jax.jit(lambda params, rows: next_token_loss(model, params, rows))
    total = sum(len(document.tokens) for document in documents)
    steps = max(1, (total - 1) // (8 * length))
    rows = (jnp.array(packed_rows(documents, step, 8, length, 0)) for step in range(steps))
    return float(np.mean([loss(params, row) for row in rows]))


def train_target(
    model: Llama,
    documents: Sequence[Document],
    directory: Path,
    schedule: Schedule,
) -> tuple[Params, list[dict[str, float]]]:
    """Train `model` on `documents`; checkpoints go to `directory`, from which it resumes."""
    params = init_params(model.specs(), jax.random.key(schedule.seed))
    matrices = jax.tree.map(lambda p: "muon" if p.ndim == 2 else "adamw", params.layers)
    labels = replace(jax.tree.map(lambda _: "adamw", params), layers=matrices)
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
