"""Reads the files of draft heads: config, layer sizes, tensor names and draft vocabulary."""

from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from specjax.checkpoint.errors import CheckpointError
from specjax.checkpoint.files import TensorFiles
from specjax.device.loading import Log, load_params, no_log
from specjax.device.models import llama
from specjax.device.models.hf_config import HFConfig
from specjax.device.models.model import Model
from specjax.device.models.registry import read_config
from specjax.device.placement import Placement, default_device

# Maps published names of tensors (see `DrafterFiles`) to their names in early EAGLE-3 exports.
LEGACY_NAMES = {
    f"fc_norm.{i}.weight": f"aux_norm_{level}.weight"
    for i, level in enumerate(("low", "mid", "high"))
}
# Tensors in checkpoints of EAGLE heads that are not loaded as weights: the integers of a draft
# vocabulary, and an embedding equal to the target's.
PUBLISHED_BESIDE = "d2t", "t2d", "embed_tokens.weight"
# Tensors in a head's file that cannot change its drafts: copies of the target used in training,
# buffers that follow from the config, and scales of 8-bit KV caches, which are not used.
_UNREAD = "verifier_norm.weight", "verifier_lm_head.weight"
_UNREAD_ENDINGS = ".rotary_emb.inv_freq", ".k_scale", ".v_scale"
# A file with one of these names after `model.` is a re-export.
_MARKS = "fc.weight", "midlayer.hidden_norm.weight", "layers.0.hidden_norm.weight"


@dataclass(frozen=True)
class DrafterFiles:
    """A drafter's tensors and config.

    The methods take published names: the tensor names in the checkpoints of a head's authors. The
    files can have other names: some tools put `model.` before all names, and early EAGLE-3 exports
    have the names `LEGACY_NAMES`.
    """

    tensors: TensorFiles
    hf: HFConfig
    placement: Placement  # where the parameters go
    log: Log = no_log

    @classmethod
    def without_weights(cls, folder: Path) -> "DrafterFiles":
        """Return the files of a folder that has a config but no weights."""
        nothing = TensorFiles(folder, {})
        return cls(nothing, read_config(folder), Placement.on(default_device()))

    @property
    def prefix(self) -> str:
        """The files' prefix before published names (see the class): "model." or ""."""
        return "model." if is_prefixed(self.tensors.names()) else ""

    def has(self, name: str) -> bool:
        """Return whether the files have the tensor with the published name `name`."""
        return self.stored_name(name) in self.tensors.names()

    def stored_name(self, name: str) -> str:
        """Return a tensor's name in the files, given the tensor's published name."""
        prefixed = self.prefix + name
        candidates = prefixed, name, LEGACY_NAMES.get(name, name)
        return next((c for c in candidates if c in self.tensors.names()), prefixed)

    def load(self, specs: Any, dtype: np.dtype, unused: tuple[str, ...] = ()) -> Any:
        """Load the parameters that the tree `specs` of `TensorSpec`s describes.

        Two kinds of tensors are not loaded: those with published names in `unused`, and those that
        cannot change drafts (see `cannot_matter`). The log names only the second kind.

        Raises:
            CheckpointError: see `load_params`.
        """
        ignored = {self.stored_name(name) for name in unused}
        passed = sorted(filter(cannot_matter, self.tensors.names()))
        params = load_params(
            self.tensors,
            specs,
            dtype,
            placement=self.placement,
            rename=self.stored_name,
            ignore=ignored.union(passed).__contains__,
        )
        if passed:
            self.log(f"{self.tensors.folder}: not used by the drafter: {', '.join(passed)}")
        return params

    def geometry(self, layer: str, target: Model, *, is_deep: bool = False) -> llama.Llama:
        """Return a `Llama` with the sizes that the config gives for the drafter's layers.

        The tensor names show whether attention has biases, and norms of queries and keys.

        Args:
            layer: the name prefix of one of the drafter's layers.
            target: the target model.
            is_deep: whether the drafter can have several layers.

        Raises:
            CheckpointError: the drafter has several layers and `is_deep` is false, or its
                vocabulary size differs from the target's.
        """
        fields = self.hf.get("transformer_layer_config", self.hf.get("model", self.hf.fields))
        config = HFConfig({**fields, "model_type": "llama"}, self.hf.origin)
        shape = llama.from_hf(config)
        if shape.num_layers != 1 and not is_deep:
            raise CheckpointError(
                f"{self.hf.origin}: num_hidden_layers={shape.num_layers}; a drafter of this "
                "method has one layer; heads with a mask_hidden go with method 'p_eagle'"
            )
        if shape.vocab_size != target.vocab_size:
            raise CheckpointError(
                f"{self.hf.origin}: vocab_size={shape.vocab_size} differs from the target's "
                f"{target.vocab_size}; use a drafter trained for this target"
            )
        attention = f"{layer}.self_attn"
        return replace(
            shape,
            qkv_bias=self.has(f"{attention}.q_proj.bias"),
            out_bias=self.has(f"{attention}.o_proj.bias"),
            qk_norm=self.has(f"{attention}.q_norm.weight"),
            num_devices=target.num_devices,
        )


def is_prefixed(names: Collection[str]) -> bool:
    """Return whether a draft head's tensor names have a prefix `model.`.

    Some tools put this prefix before the names that the head's authors chose.
    """
    return any(f"model.{mark}" in names for mark in _MARKS)


def cannot_matter(name: str) -> bool:
    """Return whether a tensor in a head's file cannot change the head's drafts.

    Such a tensor is, for example, a copy of the target's output head, or a buffer of rotary
    frequencies.
    """
    return name.removeprefix("model.") in _UNREAD or name.endswith(_UNREAD_ENDINGS)


def embed_tokens(target: Model, params: Any, tokens: jax.Array) -> jax.Array:
    """Return the embeddings [N, D] of `tokens` i32[N].

    They come from the drafter's embedding, or from the target's if the drafter has none.
    """
    own = params.drafter.embedding
    return target.embed(params.target, tokens) if own is None else own.rows(tokens)


def read_target_ids(
    files: DrafterFiles,
    draft_vocab_size: int,
    target: Model,
    name: str = "d2t",
    *,
    are_offsets: bool = True,
    size: str = "draft_vocab_size",
) -> jax.Array | None:
    """Return the target's ids i32[V_d] of the draft vocabulary's tokens, read from tensor `name`.

    If `are_offsets`, the tensor's i-th number is the i-th id minus i. If the files have no such
    tensor, both vocabularies have the same ids, and the result is None. `size` is the name of the
    config field with the draft vocabulary's size, for error messages.

    Raises:
        CheckpointError: the tensor is missing although the vocabularies differ in size, or it does
            not hold token ids of the target.
    """
    origin, vocab_size = files.hf.origin, target.vocab_size
    if not files.has(name):
        if draft_vocab_size != vocab_size:
            raise CheckpointError(
                f"{origin}: {size}={draft_vocab_size} differs from the target's {vocab_size}, but "
                f"the weights have no {name}"
            )
        return None
    ids = files.tensors.read(files.stored_name(name))
    is_map = ids.shape == (draft_vocab_size,) and ids.dtype.kind in "iu"
    if is_map:
        ids = ids.astype(np.int64) + (np.arange(draft_vocab_size) if are_offsets else 0)
    if not is_map or ids.min() < 0 or ids.max() >= vocab_size:
        what = "offsets of ids" if are_offsets else "ids"
        raise CheckpointError(
            f"{origin}: {name} must be {draft_vocab_size} integers, {what} within the target's "
            f"{vocab_size} tokens, got {ids.dtype}{list(ids.shape)}; use a drafter made for this "
            "target"
        )
    return files.placement.put(ids.astype(np.int32))


def without_shared_embedding(
    head: Any, params: Any, target: Model, target_params: Any
) -> tuple[Any, Any]:
    """Return a head and its parameters, without the head's embedding if it equals the target's.

    If one of the two embeddings is quantised, the head keeps its embedding.
    """
    if not head.has_embedding:
        return head, params
    if target_params.embedding.numbers or params.embedding.numbers:
        return head, params
    shared, own = target_params.embedding.values, params.embedding.values
    if shared.shape != own.shape or not bool((shared == own).all()):
        return head, params
    return replace(head, has_embedding=False), replace(params, embedding=None)
