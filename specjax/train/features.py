"""The features that a target computes for documents: the training data of drafters."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from specjax.device.models.model import Model
from specjax.train.context import CausalRows
from specjax.train.data import Document, padded_rows, shuffled_indices, window

# The target's features of a document of n tokens: the pair (hidden, auxiliary) of arrays
# [n - 1, D] and [n - 1, A D]; auxiliary may be None.
Exported: TypeAlias = tuple[np.ndarray, np.ndarray | None]


class Batch(NamedTuple):
    """Documents as B rows of T tokens, and the target's features of the tokens."""

    tokens: Any  # i32[B, T]
    is_answer: Any  # bool[B, T], true at the answers' tokens
    hidden: Any  # [B, T, D], hidden states after the target's final norm
    auxiliary: Any  # [B, T, A D], states for the A auxiliary layers; empty if A is 0


@dataclass(frozen=True)
class FeatureSet:
    """Features of all documents, computed once and kept in host memory."""

    rows: Batch

    @classmethod
    def of(
        cls,
        target: Model,
        params: Any,
        documents: Sequence[Document],
        length: int,
        aux_layers: tuple[int, ...],
        batch: int = 16,
    ) -> "FeatureSet":
        """Run the target on documents, and return the target's features in float16.

        The documents are truncated or padded to `length` tokens.

        Raises:
            ValueError: no tokens of answers remain after truncation.
        """

        @jax.jit
        def run(params, tokens):
            rows = CausalRows.of(batch, length)
            features, _ = target.extend(params, tokens.reshape(-1), rows, None, aux_layers)
            auxiliary = features.auxiliary
            if auxiliary is None:
                auxiliary = jnp.zeros((batch * length, 0))
            return (
                features.hidden.reshape(batch, length, -1).astype(jnp.float16),
                auxiliary.reshape(batch, length, -1).astype(jnp.float16),
            )

        tokens, is_answer = padded_rows(documents, length)
        _check_answers(is_answer, length)
        hidden, auxiliary = [], []
        for start in range(0, len(tokens), batch):
            chunk = np.resize(tokens[start : start + batch], (batch, length))
            for kept, part in zip((hidden, auxiliary), run(params, jnp.array(chunk)), strict=True):
                kept.append(np.asarray(part))
        count = len(tokens)
        return cls(
            Batch(
                tokens,
                is_answer,
                np.concatenate(hidden)[:count],
                np.concatenate(auxiliary)[:count],
            )
        )

    @classmethod
    def exported(
        cls,
        documents: Sequence[Document],
        features: Iterable[Exported],
        length: int,
    ) -> "FeatureSet":
        """Return the set of `documents` with the features that `features` yields.

        For each document, `features` yields the features of all tokens but the last. Documents
        longer than `length`, and their features, are then cut by `window`. If `features` is a
        generator, only one document's uncut features are in memory at a time.

        Raises:
            ValueError: no tokens of answers remain after this cut.
        """
        windows = [window(document, length) for document in documents]
        tokens, is_answer = padded_rows(
            [
                Document(d.tokens[w], max(0, d.num_prompt - w.start))
                for d, w in zip(documents, windows, strict=True)
            ],
            length,
        )
        _check_answers(is_answer, length)
        # Use map: the variables of a loop would keep features alive.
        rows = list(map(partial(_window_row, length=length), features, windows))
        hidden, auxiliary = (np.stack(part) for part in zip(*rows, strict=True))
        return cls(Batch(tokens, is_answer, hidden, auxiliary))

    def batch_at(self, step: int, batch: int, seed: int) -> Batch:
        """Return the rows of a training step. The rows depend only on the arguments."""
        index = shuffled_indices(len(self.rows.tokens), step, batch, seed)
        tokens, is_answer, hidden, auxiliary = (jnp.array(part[index]) for part in self.rows)
        return Batch(tokens, is_answer, hidden.astype(jnp.float32), auxiliary.astype(jnp.float32))


def feature_bytes(
    target: Model, num_documents: int, length: int, aux_layers: tuple[int, ...]
) -> int:
    """Return the size in bytes of the result of `FeatureSet.of` for `num_documents` documents."""
    per_token = 2 * target.hidden_size * (1 + len(aux_layers)) + 4 + 1  # i32 token, bool is_answer
    return num_documents * length * per_token


def _window_row(one: Exported, kept: slice, *, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the rows `kept` of a document's features, padded to `length` rows."""
    hidden, auxiliary = one
    if auxiliary is None:
        auxiliary = np.zeros((len(hidden), 0), np.float32)

    def padded(features: np.ndarray) -> np.ndarray:
        rows = features[kept]
        return np.pad(rows, ((0, length - len(rows)), (0, 0)))

    return padded(hidden), padded(auxiliary)


def _check_answers(is_answer: np.ndarray, length: int) -> None:
    if not is_answer.any():
        raise ValueError(
            f"length={length} cuts every document before its answer, so there are no tokens to "
            "learn from; raise it"
        )
