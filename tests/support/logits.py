"""Logits of whole sequences, computed by our models as in training, or by transformers."""

from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from specjax.device.models.registry import load_model
from specjax.train.context import CausalRows


def hf_logits(hf: Any, tokens: Any) -> np.ndarray:
    """Return transformers' logits f32[B, T, V] for tokens [B, T]."""
    import torch

    with torch.no_grad():
        return hf(input_ids=torch.tensor(tokens)).logits.float().numpy()


def causal_logits(folder: Path, tokens: np.ndarray, dtype: str = "float32") -> np.ndarray:
    """Return our logits f32[B, T, V] with a checkpoint.

    Checkpoints with equal configs share a compiled program.
    """
    model, params = load_model(folder, np.dtype(dtype))
    return np.asarray(_causal_logits(params, tokens, model))


@partial(jax.jit, static_argnames="model")
def _causal_logits(params, tokens, model):
    features, _ = model.extend(params, tokens.reshape(-1), CausalRows.of(*tokens.shape), None)
    return model.logits(params, features.hidden).reshape(*tokens.shape, -1)


def double(tokens, length, logits):
    """Double the logits, as a logits processor."""
    return 2 * logits


def halve(tokens, length, logits):
    """Halve the logits, as a logits processor."""
    return logits / 2
