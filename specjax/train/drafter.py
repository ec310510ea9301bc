"""Trains drafters (EAGLE-1, EAGLE-3, MTP) for a frozen target, with the engine's forward."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax

from specjax.device.drafters import mtp
from specjax.device.drafters.chain import Head
from specjax.device.drafters.drafter import DrafterWeights, Params
from specjax.device.drafters.eagle import EagleHead, EagleParams
from specjax.device.drafters.eagle3 import Eagle3Head, Eagle3Params
from specjax.device.drafters.mtp import MTPHead, MTPParams
from specjax.device.models.model import Features, Model
from specjax.train.context import CausalRows, UnrolledRows
from specjax.train.data import Document, padded_rows, shuffled_indices, window
from specjax.train.loop import Loss, Schedule, fit
from specjax.train.target import init_params, matrix_labels

# The target's features of a document: hidden [n - 1, D], and auxiliary [n - 1, A D] or None.
Exported: TypeAlias = tuple[np.ndarray, np.ndarray | None]

UNTRAINED = ("embedding", "target_ids")  # fields of drafters' parameters that are frozen


class Batch(NamedTuple):
    """Documents and the target's features of them, B rows of T tokens."""

    tokens: Any  # i32[B, T]
    is_answer: Any  # bool[B, T]
    hidden: Any  # [B, T, D], after the target's final norm
    auxiliary: Any  # [B, T, A D], empty without auxiliary layers


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
        """Run the target on the documents, truncated or padded to `length`; stored as float16.

        Raises:
            ValueError: no document has an answer within `length`.
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
        """Return features computed elsewhere, of all but each document's last token.

        `features` are of whole documents; longer ones than `length` are cut by `window`. If
        `features` is lazy, each document's features are freed before the next are computed.

        Raises:
            ValueError: no document has an answer within `length`.
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
        # Not a loop, whose variables would keep features alive.
        rows = list(map(partial(_window_row, length=length), features, windows))
        hidden, auxiliary = (np.stack(part) for part in zip(*rows, strict=True))
        return cls(Batch(tokens, is_answer, hidden, auxiliary))

    def batch_at(self, step: int, batch: int, seed: int) -> Batch:
        """Return the rows of a training step, a pure function of its arguments."""
        index = shuffled_indices(len(self.rows.tokens), step, batch, seed)
        tokens, is_answer, hidden, auxiliary = (jnp.array(part[index]) for part in self.rows)
        return Batch(tokens, is_answer, hidden.astype(jnp.float32), auxiliary.astype(jnp.float32))


def _window_row(one: Exported, kept: slice, *, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the kept rows of a document's features, copied into arrays [length, ...]."""
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
            f"length={length} cuts every document before its answer, so there is nothing to "
            "learn; raise it"
        )


def shift(x: jax.Array, count: int) -> jax.Array:
    """Shift x [B, T, ...] by `count` positions to the left, with zeros at the end."""
    return jnp.pad(x[:, count:], ((0, 0), (0, count)) + ((0, 0),) * (x.ndim - 2))


class Frozen(NamedTuple):
    """Parameters that a drafter's loss uses and does not train."""

    target: Any  # the target's parameters
    drafter: dict[str, Any]  # the drafter's frozen parameters, by field

    def join(self, trainable: Any) -> Params:
        """Return the full parameters of target and drafter."""
        return Params(self.target, replace(trainable, **self.drafter))


def split_frozen(params: Any) -> tuple[Any, dict[str, Any]]:
    """Split a drafter's parameters into the trained ones, and the frozen ones by field.

    A draft vocabulary is not a weight. An embedding of the drafter is a copy and stays frozen:
    training would change only the rows of tokens that occur in the data.
    """
    frozen = {name: getattr(params, name) for name in UNTRAINED if hasattr(params, name)}
    return replace(params, **dict.fromkeys(frozen)), frozen


def drafter_loss(target: Model, weights: DrafterWeights, *, num_unrolled: int) -> Loss:
    """Return the training loss of a kind of head.

    Raises:
        ValueError: a kind that has none.
    """
    unrolled = partial(unrolled_loss, num_unrolled=num_unrolled)
    losses = {EagleHead: eagle1_loss, Eagle3Head: unrolled, MTPHead: unrolled}
    if type(weights) not in losses:
        raise ValueError(
            f"drafters of kind {type(weights).__name__} cannot be trained here; one of "
            f"{', '.join(kind.__name__ for kind in losses)} can"
        )
    return partial(losses[type(weights)], target, weights)


def drafter_labels(params: Any) -> Any:
    """Return each array's optimiser for `muon_and_adamw`; AdamW for LM heads."""
    labels = matrix_labels(params)
    return replace(labels, lm_head="adamw") if isinstance(params, Eagle3Params) else labels


def unrolled_loss(
    target: Model,
    head: Head,
    trainable: Any,
    frozen: Frozen,
    batch: Batch,
    key: jax.Array,
    *,
    num_unrolled: int,
    decay: float = 0.8,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Cross-entropy to the target's distribution over the draft vocabulary, over an unrolled chain.

    Step j runs the head on its own previous output, as drafting does, and is weighted decay^j
    (Li et al. 2025, section 3.2, training-time test). Positions whose most likely token is not in
    the draft vocabulary are ignored.
    """
    params = frozen.join(trainable)
    target_ids = head.target_ids(params.drafter)
    size, length = batch.tokens.shape
    hidden = batch.hidden.reshape(size * length, -1)
    teacher = target.logits(params.target, hidden)
    is_drafted = jnp.ones((size, length), bool)
    if target_ids is not None:
        is_drafted = jnp.isin(teacher.argmax(-1), target_ids).reshape(size, length)
        teacher = teacher[:, target_ids]
    teacher = jax.nn.softmax(teacher).reshape(size, length, -1)

    auxiliary = batch.auxiliary.reshape(size * length, -1)
    hidden = head.fuse(params.drafter, Features(hidden, auxiliary))
    kv: tuple = ()
    total, metrics = jnp.float32(0), {}
    for step in range(num_unrolled):
        tokens = shift(batch.tokens, step + 1).reshape(-1)
        rows = UnrolledRows.of(size, length, step)
        hidden, kv = head.extend(target, params, tokens, hidden, rows, kv)
        logits = head.logits(target, params, hidden).reshape(size, length, -1)
        expected = shift(teacher, step + 1)
        counts = shift(batch.is_answer, step + 2) & shift(is_drafted, step + 1)
        weight = counts.astype(jnp.float32) / jnp.maximum(counts.sum(), 1).astype(jnp.float32)
        loss = -(expected * jax.nn.log_softmax(logits)).sum(-1)
        total += decay**step * (loss * weight).sum()
        right = logits.argmax(-1) == expected.argmax(-1)
        metrics[f"accuracy_{step + 1}"] = (right.astype(jnp.float32) * weight).sum()
    return total, metrics


def eagle1_loss(
    target: Model,
    head: EagleHead,
    trainable: EagleParams,
    frozen: Frozen,
    batch: Batch,
    key: jax.Array,
    *,
    noise: float = 0.1,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Smooth L1 to the target's next feature plus 0.1 cross-entropy (Li et al. 2024, section 3.2).

    Uniform noise on the input features simulates the head's own errors, since it drafts from its
    own outputs.
    """
    size, length = batch.tokens.shape
    params = frozen.join(trainable)
    flat = batch.hidden.reshape(size * length, -1)
    noisy = flat + noise * jax.random.uniform(key, flat.shape, minval=-1.0)
    tokens = shift(batch.tokens, 1).reshape(-1)
    rows = CausalRows.of(size, length)
    predicted, _ = head.extend(target, params, tokens, noisy, rows, None)
    expected = shift(batch.hidden, 1).reshape(flat.shape)
    counts = shift(batch.is_answer, 2).reshape(-1)
    weight = counts.astype(jnp.float32) / jnp.maximum(counts.sum(), 1).astype(jnp.float32)
    feature_loss = (optax.losses.huber_loss(predicted, expected).mean(-1) * weight).sum()
    logits = head.logits(target, params, predicted)
    teacher = target.logits(params.target, expected)
    token_loss = -(jax.nn.softmax(teacher) * jax.nn.log_softmax(logits)).sum(-1)
    token_loss = (token_loss * weight).sum()
    right = logits.argmax(-1) == teacher.argmax(-1)
    accuracy = (right.astype(jnp.float32) * weight).sum()
    metrics = {"feature_loss": feature_loss, "accuracy_1": accuracy}
    return feature_loss + 0.1 * token_loss, metrics


def draft_vocabulary(documents: Sequence[Document], vocab_size: int, size: int) -> np.ndarray:
    """Return the `size` most frequent token ids of the answers, ascending, i32[size]."""
    counts = np.bincount(
        np.concatenate([document.tokens[document.num_prompt :] for document in documents]),
        minlength=vocab_size,
    )
    return np.sort(np.argsort(-counts, kind="stable")[:size]).astype(np.int32)


def train_eagle3(
    target: Model,
    target_params: Any,
    documents: Sequence[Document],
    directory: Path,
    schedule: Schedule,
    *,
    aux_layers: tuple[int, ...],
    draft_vocab_size: int,
    num_unrolled: int,
) -> tuple[Eagle3Head, Eagle3Params, list[dict[str, float]]]:
    """Train an EAGLE-3 head for `target`; checkpoints go to `directory`, from which it resumes."""
    head = Eagle3Head(
        shape=target.head_shape,
        target_hidden_size=target.hidden_size,
        draft_vocab_size=draft_vocab_size,
        aux_layers=aux_layers,
    )
    ids = jnp.array(draft_vocabulary(documents, target.vocab_size, draft_vocab_size))
    frozen = Frozen(target_params, {"target_ids": ids})
    params, log = _train(target, head, frozen, documents, directory, schedule, num_unrolled)
    return head, replace(params, target_ids=ids), log


def train_eagle1(
    target: Model,
    target_params: Any,
    documents: Sequence[Document],
    directory: Path,
    schedule: Schedule,
) -> tuple[EagleHead, Any, list[dict[str, float]]]:
    """Train an EAGLE-1 head for `target`; checkpoints go to `directory`, from which it resumes."""
    head = EagleHead(shape=target.head_shape)
    params, log = _train(target, head, Frozen(target_params, {}), documents, directory, schedule)
    return head, params, log


def train_mtp(
    target: Model,
    target_params: Any,
    documents: Sequence[Document],
    directory: Path,
    schedule: Schedule,
    *,
    num_unrolled: int,
) -> tuple[MTPHead, MTPParams, list[dict[str, float]]]:
    """Train the target's MTP module; checkpoints go to `directory`, from which it resumes.

    Drafting applies its one layer recursively, so it is unrolled (FastMTP, Cai et al. 2025).
    """
    head = mtp.of_own_shape(target, "target")
    frozen = Frozen(target_params, {})
    params, log = _train(target, head, frozen, documents, directory, schedule, num_unrolled)
    return head, params, log


def _train(
    target: Model,
    head: Any,
    frozen: Frozen,
    documents: Sequence[Document],
    directory: Path,
    schedule: Schedule,
    num_unrolled: int = 1,
) -> tuple[Any, list[dict[str, float]]]:
    features = FeatureSet.of(target, frozen.target, documents, schedule.length, head.aux_layers)
    params = init_params(head.specs(), jax.random.key(schedule.seed))
    return fit(
        params,
        frozen,
        drafter_labels(params),
        drafter_loss(target, head, num_unrolled=num_unrolled),
        partial(features.batch_at, batch=schedule.batch_size, seed=schedule.seed),
        directory,
        schedule,
    )
