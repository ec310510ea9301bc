"""Trains drafters for a frozen target, with the engine's forward pass.

`KINDS` is the table of the kinds of drafters that can be trained.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console

from specjax.checkpoint.config_json import read_json
from specjax.checkpoint.files import open_checkpoint, open_file
from specjax.checkpoint.given import as_arrays
from specjax.checkpoint.save import FILE
from specjax.config import SpeculativeConfig
from specjax.device.drafters import dflash_files, dspark, eagle, eagle3, medusa, mtp_files, p_eagle
from specjax.device.drafters.dflash import AttentionMask, DFlashHead
from specjax.device.drafters.dspark import Markov
from specjax.device.drafters.eagle import EagleHead
from specjax.device.drafters.eagle3 import Eagle3Head
from specjax.device.drafters.medusa import MedusaHeads
from specjax.device.drafters.p_eagle import PEagleHead
from specjax.device.drafters.registry import load_drafter
from specjax.device.models.model import Model
from specjax.train.data import Document
from specjax.train.features import FeatureSet, feature_bytes
from specjax.train.loop import Schedule, fit
from specjax.train.losses import drafter_labels, drafter_loss, split_frozen
from specjax.train.optimizer import muon_and_adamw
from specjax.train.target import init_params
from specjax.train.teacher import Frozen


@dataclass(frozen=True, kw_only=True)
class HeadSizes:
    """The sizes of a new head. If a size is None, the default of the head's kind is used.

    A head uses only the sizes that apply to its kind. Other sizes are ignored.

    Attributes:
        aux_layers: the layers of the target whose input the head reads.
        draft_vocab_size: the size of the draft vocabulary, which has the most frequent tokens of
            the answers.
        num_layers: the number of layers of a DFlash, DSpark or P-EAGLE head.
        block_size: for a DFlash head, one more than its number of drafts; for a DSpark head, its
            number of drafts.
        mask_token_id: the token that DFlash, DSpark and P-EAGLE heads read in place of unknown
            tokens. Texts should not contain it. These heads need it; there is no default.
        markov_rank: the rank of the matrix by which a DSpark head corrects logits for the previous
            token.
        num_heads: the number of Medusa heads; each head makes one draft.
    """

    aux_layers: Sequence[int] | None = None
    draft_vocab_size: int | None = None
    num_layers: int | None = None
    block_size: int | None = None
    mask_token_id: int | None = None
    markov_rank: int | None = None
    num_heads: int | None = None


class InitialHead(NamedTuple):
    """The head at the start of training."""

    head: Any  # `DrafterWeights`
    frozen: dict[str, Any]  # parameters that are not trained, by field
    trainable: Any | None  # parameters to train; None to begin with random weights
    config: Mapping[str, Any]  # content of its `config.json`
    names: Sequence[str] = ()  # tensors in the checkpoint of a head that is trained further
    file: str = FILE  # name of the file for the weights


class Kind(NamedTuple):
    """A kind of drafter that can be trained."""

    method: str  # the kind's name in a `SpeculativeConfig`
    # Returns a new head.
    make: Callable[[Model, HeadSizes, Sequence[Document]], InitialHead]
    # Returns the number of drafts that a head always makes; None if it can make any number.
    num_drafts: Callable[[InitialHead], int | None] = lambda start: None
    # Takes a head and its parameters; returns the checkpoint's tensors that are not weights.
    vocabulary: Callable[[Any, Any], Mapping[str, np.ndarray]] = lambda head, params: {}
    # Takes a folder; returns the file with the weights, or None if the file has the usual name.
    find_file: Callable[[Path], Path | None] = lambda folder: None


def _eagle1(target: Model, sizes: HeadSizes, documents: Sequence[Document]) -> InitialHead:
    head = EagleHead(shape=target.head_shape)
    return InitialHead(head, {}, None, eagle.to_hf(head))


def _eagle3(target: Model, sizes: HeadSizes, documents: Sequence[Document]) -> InitialHead:
    vocab_size = sizes.draft_vocab_size or 1024
    head = Eagle3Head(
        shape=target.head_shape,
        target_hidden_size=target.hidden_size,
        draft_vocab_size=vocab_size,
        aux_layers=_aux_layers(target, sizes),
    )
    ids = jnp.array(draft_vocabulary(documents, target.vocab_size, vocab_size))
    return InitialHead(head, {"target_ids": ids}, None, eagle3.to_hf(head))


def _mtp(target: Model, sizes: HeadSizes, documents: Sequence[Document]) -> InitialHead:
    return InitialHead(mtp_files.of_own_shape(target, "target"), {}, None, {})


def _p_eagle(target: Model, sizes: HeadSizes, documents: Sequence[Document]) -> InitialHead:
    body, frozen, *_ = _eagle3(target, sizes, documents)
    shape = replace(body.shape, num_layers=sizes.num_layers or 2)
    own = {"shape": shape, "mask_token_id": _mask_token_id(target, sizes), "recycle_normed": True}
    head = PEagleHead(**vars(body) | own)
    return InitialHead(head, frozen, None, p_eagle.to_hf(head))


def _dflash(target: Model, sizes: HeadSizes, documents: Sequence[Document]) -> InitialHead:
    shape = replace(target.head_shape, num_layers=sizes.num_layers or 2, qk_norm=True)
    head = DFlashHead(
        shape=shape,
        target_hidden_size=target.hidden_size,
        draft_vocab_size=target.vocab_size,
        aux_layers=_aux_layers(target, sizes),
        mask_token_id=_mask_token_id(target, sizes),
        attention_masks=(AttentionMask(),) * shape.num_layers,
    )
    return InitialHead(
        head, {}, None, dflash_files.to_hf(head, target.num_layers, sizes.block_size or BLOCK_SIZE)
    )


def _dspark(target: Model, sizes: HeadSizes, documents: Sequence[Document]) -> InitialHead:
    sizes = replace(sizes, block_size=sizes.block_size or BLOCK_SIZE - 1)
    start, rank = _dflash(target, sizes, documents), sizes.markov_rank or 256
    return start._replace(
        head=replace(start.head, refinement=Markov(rank=rank), first_row=0),
        config={**start.config, **dspark.to_hf(rank)},
    )


def _medusa(target: Model, sizes: HeadSizes, documents: Sequence[Document]) -> InitialHead:
    heads = MedusaHeads(
        num_heads=sizes.num_heads or 3,
        num_blocks=1,
        hidden_size=target.hidden_size,
        draft_vocab_size=target.vocab_size,
        has_bias=True,
    )
    return InitialHead(heads, {}, None, medusa.to_hf(heads))


def _num_drafted_by_block(start: InitialHead) -> int:
    return start.config.get("block_size", 16) - start.head.first_row


BLOCK_SIZE = 8
# Kinds of drafters by the first argument of `specjax train`.
KINDS = {
    "eagle1": Kind("eagle", _eagle1),
    "eagle3": Kind("eagle3", _eagle3, vocabulary=eagle3.vocabulary_tensors),
    "mtp": Kind("mtp", _mtp),
    "p_eagle": Kind("p_eagle", _p_eagle, vocabulary=eagle3.vocabulary_tensors),
    "dflash": Kind("dflash", _dflash, _num_drafted_by_block, eagle3.vocabulary_tensors),
    "dspark": Kind("dflash", _dspark, _num_drafted_by_block, eagle3.vocabulary_tensors),
    "medusa": Kind(
        "medusa",
        _medusa,
        lambda start: start.head.num_heads,
        medusa.vocabulary_tensors,
        medusa.find_first_file,
    ),
}


def warm_start(kind: Kind, folder: Path, target: Model) -> InitialHead:
    """Load a draft head in float32 from `folder`, to continue its training.

    Raises:
        CheckpointError: the files are damaged or were made for another target.
    """
    speculation = SpeculativeConfig(method=kind.method, model=str(folder), num_speculative_tokens=1)
    drafter, params = load_drafter(folder, speculation, target, np.dtype("float32"))
    assert drafter.weights is not None, kind.method
    trainable, frozen = split_frozen(params)
    config, own = read_json(folder, "config.json"), kind.find_file(folder)
    files = open_checkpoint(folder) if own is None else open_file(own)
    name = FILE if own is None else own.with_suffix(".safetensors").name
    return InitialHead(drafter.weights, frozen, trainable, config, tuple(files.names()), name)


def _mask_token_id(target: Model, sizes: HeadSizes) -> int:
    token = sizes.mask_token_id
    if token is None or not 0 <= token < target.vocab_size:
        raise ValueError(
            f"--mask-token-id={token} must be one of the target's {target.vocab_size} tokens, best "
            "one that texts do not have"
        )
    return token


def _aux_layers(target: Model, sizes: HeadSizes) -> tuple[int, ...]:
    num_layers = target.num_layers
    return tuple(sizes.aux_layers or (2, num_layers // 2, num_layers - 3))


def draft_vocabulary(documents: Sequence[Document], vocab_size: int, size: int) -> np.ndarray:
    """Return the `size` most frequent token ids of the answers, in ascending order, i32[size]."""
    counts = np.bincount(
        np.concatenate([document.tokens[document.num_prompt :] for document in documents]),
        minlength=vocab_size,
    )
    return np.sort(np.argsort(-counts, kind="stable")[:size]).astype(np.int32)


def train_drafter(
    target: Model,
    target_params: Any,
    start: InitialHead,
    documents: Sequence[Document],
    directory: Path,
    schedule: Schedule,
    *,
    num_unrolled: int = 4,
) -> tuple[Any, list[dict[str, float]]]:
    """Train a head for `target`.

    Checkpoints are saved in `directory`, and a killed run resumes from them.

    Args:
        num_unrolled: the number of consecutive drafts that are trained together; see
            `drafter_loss`. Drafting applies the single layer of an MTP module recursively, so
            training also unrolls this layer (FastMTP, Cai et al. 2025).

    Returns:
        The head's parameters in float32, and the log of metrics.

    Raises:
        ValueError: a leaf of `target_params` is not an array, or cannot be read; or as for
            `drafter_loss`, `FeatureSet.of` and `fit`.
    """
    target_params = as_arrays(target_params, "target's params")
    head, frozen = start.head, Frozen(target_params, start.frozen)
    trainable = start.trainable
    if trainable is None:
        trainable = init_params(head.specs(), jax.random.key(schedule.seed))
    labels = drafter_labels(trainable)
    _say_memory(target, head, frozen, trainable, labels, len(documents), schedule)
    features = FeatureSet.of(target, target_params, documents, schedule.length, head.aux_layers)
    trained, log = fit(
        trainable,
        frozen,
        labels,
        drafter_loss(target, head, num_unrolled=num_unrolled),
        partial(features.batch_at, batch=schedule.batch_size, seed=schedule.seed),
        directory,
        schedule,
    )
    return replace(trained, **start.frozen), log


def _say_memory(
    target: Model,
    head: Any,
    frozen: Frozen,
    trainable: Any,
    labels: Any,
    num_documents: int,
    schedule: Schedule,
) -> None:
    """Print the sizes of the arrays that training keeps from its first step to its last."""
    optimizer = muon_and_adamw(labels, schedule.learning_rate, schedule.steps)
    parts = {
        "features in host memory": feature_bytes(
            target, num_documents, schedule.length, head.aux_layers
        ),
        "the target": _num_bytes(frozen),
        "the drafter": _num_bytes(trainable),
        "gradients": _num_bytes(trainable),
        "optimizer": _num_bytes(jax.eval_shape(optimizer.init, trainable)),
    }
    text = ", ".join(f"{name} {size / 2**20:,.0f} MiB" for name, size in parts.items())
    Console(stderr=True).print(
        f"memory, by the arrays' sizes and without activations: {text}",
        highlight=False,
        soft_wrap=True,
    )


def _num_bytes(tree: Any) -> int:
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))
