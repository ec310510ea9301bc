"""Training a small target model from scratch: next-token cross-entropy on packed rows."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
from tokenizers import Tokenizer

from specjax.checkpoint.spec import TensorSpec
from specjax.device.models.layers.rope import Rope
from specjax.device.models.llama import Llama, Params
from specjax.train.context import CausalRows
from specjax.train.data import batch_at, encode_documents
from specjax.train.loop import fit


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


def init_params(model: Llama, key: jax.Array) -> Params:
    """f32 weights: norms one, biases zero, matrices normal with the usual 1/sqrt(fan in)."""
    specs, tree = jax.tree.flatten(model.specs())
    keys = jax.random.split(key, len(specs))
    return jax.tree.unflatten(tree, [_init(s, k) for s, k in zip(specs, keys, strict=True)])


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


def optimizer(params: Params, peak: float, steps: int) -> optax.GradientTransformation:
    """Muon (Jordan 2024) for the layers' matrices, AdamW for the rest; warm-up, linear decay."""
    warmup = steps // 25 + 1
    schedule = optax.join_schedules(
        [
            optax.linear_schedule(0.0, peak, warmup),
            optax.linear_schedule(peak, 0.02 * peak, steps - warmup),
        ],
        [warmup],
    )
    matrices = jax.tree.map(lambda p: "muon" if p.ndim == 2 else "adamw", params.layers)
    labels = replace(jax.tree.map(lambda _: "adamw", params), layers=matrices)
    rules = {
        # RMS-matched updates let both rules share one learning rate (Liu et al. 2025, eq. 4).
        "muon": optax.contrib.muon(schedule, weight_decay=0.05, consistent_rms=0.2),
        "adamw": optax.adamw(schedule, b2=0.95, weight_decay=0.01),
    }
    return optax.chain(optax.clip_by_global_norm(1.0), optax.multi_transform(rules, labels))


def evaluate(model: Llama, params: Params, rows: np.ndarray, batch: int) -> float:
    """Mean held-out loss (nats per token) over rows i32[N, T + 1]."""
    loss = jax.jit(lambda params, rows: next_token_loss(model, params, rows))
    chunks = [jnp.array(rows[i : i + batch]) for i in range(0, len(rows) - batch + 1, batch)]
    return float(np.mean([loss(params, chunk) for chunk in chunks]))


def train_target(
    tokenizer: Tokenizer,
    documents: Sequence[tuple[str, str]],
    directory: Path,
    *,
    num_layers: int,
    hidden_size: int,
    steps: int,
    batch_size: int,
    length: int,
    learning_rate: float,
    seed: int,
) -> tuple[Llama, Params, list[dict[str, float]]]:
    """Train a decoder on `documents`; checkpoints go to `directory`, from which it resumes."""
    model = demo_model(tokenizer.get_vocab_size(), num_layers, hidden_size)
    params = init_params(model, jax.random.key(seed))
    encoded = encode_documents(tokenizer, documents)
    params, log = fit(
        params,
        lambda params, rows, key: (next_token_loss(model, params, rows), {}),
        lambda step: jnp.array(batch_at(encoded, step, batch_size, length, seed)),
        optimizer(params, learning_rate, steps),
        steps=steps,
        directory=directory,
        seed=seed,
    )
    return model, params, log
