"""Reading the files of drafting heads: config, geometry of a layer, name prefixes, token ids."""

from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.checkpoint.errors import CheckpointError
from specjax.checkpoint.files import TensorFiles
from specjax.device.loading import Log, load_params, no_log
from specjax.device.models import llama
from specjax.device.models.hf_config import HFConfig
from specjax.device.models.model import Model
from specjax.device.models.registry import read_config
from specjax.device.placement import Placement, default_device

# Names of tensors in early EAGLE-3 exports.
LEGACY_NAMES = {
    f"fc_norm.{i}.weight": f"aux_norm_{level}.weight"
    for i, level in enumerate(("low", "mid", "high"))
}
# Tensors in checkpoints of EAGLE heads that are not loaded as weights: the integers of a draft
# vocabulary, and an embedding that is a copy of the target's.
PUBLISHED_BESIDE = "d2t", "t2d", "embed_tokens.weight"
# Tensors that may be in a head's file and cannot change its drafts: what training compared with,
# buffers that follow from the config, and scales of caches in 8 bits, which are not used.
_UNREAD = "verifier_norm.weight", "verifier_lm_head.weight"
_UNREAD_ENDINGS = ".rotary_emb.inv_freq", ".k_scale", ".v_scale"
# By one of these names, behind `model.`, a re-export is known.
_MARKS = "fc.weight", "midlayer.hidden_norm.weight", "layers.0.hidden_norm.weight"


@dataclass(frozen=True)
class DrafterFiles:
    """Tensors and config of a drafter; prefixes that re-exports add to names are ignored."""

    tensors: TensorFiles
    hf: HFConfig
    placement: Placement  # where the parameters go
    log: Log = no_log

    @classmethod
    def without_weights(cls, folder: Path) -> "DrafterFiles":
        """Return the config of a folder that has nothing else."""
        nothing = TensorFiles(folder, {})
        return cls(nothing, read_config(folder), Placement.on(default_device()))

    @property
    def prefix(self) -> str:
        """The prefix that a re-export added to names: "model." or nothing."""
        return "model." if is_prefixed(self.tensors.names()) else ""

    def has(self, name: str) -> bool:
        """Return whether there is a tensor of this published name."""
        return self.stored_name(name) in self.tensors.names()

    def stored_name(self, name: str) -> str:
        """Return the name in the files of a published name."""
        prefixed = self.prefix + name
        candidates = prefixed, name, LEGACY_NAMES.get(name, name)
        return next((c for c in candidates if c in self.tensors.names()), prefixed)

    def load(self, specs: Any, dtype: np.dtype, unused: tuple[str, ...] = ()) -> Any:
        """Load the parameters; tensors with published names in `unused` are not read.

        A line in the log names others that are passed over.
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
        """Return the geometry of the drafter's layer, or layers if it `is_deep`; optional tensors
        are found by name in `layer`."""
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
                f"{self.hf.origin}: vocab_size={shape.vocab_size}, the target's is "
                f"{target.vocab_size}; use a drafter trained for this target"
            )
        attention = f"{layer}.self_attn"
        return replace(
            shape,
            qkv_bias=self.has(f"{attention}.q_proj.bias"),
            out_bias=self.has(f"{attention}.o_proj.bias"),
            qk_norm=self.has(f"{attention}.q_norm.weight"),
        )


def is_prefixed(names: Collection[str]) -> bool:
    """Return whether a re-export of a head has put `model.` before its names."""
    return any(f"model.{mark}" in names for mark in _MARKS)


def cannot_matter(name: str) -> bool:
    """Return whether a tensor in a head's file can be passed over, see `_UNREAD`."""
    return name.removeprefix("model.") in _UNREAD or name.endswith(_UNREAD_ENDINGS)


def embed_tokens(target: Model, params: Any, tokens: jax.Array) -> jax.Array:
    """Return embeddings [N, D] of tokens i32[N]: the drafter's own, or else the target's."""
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
    """Return the target's ids i32[V_d] of the draft vocabulary; None if the two are the same.

    The tensor `name` has these ids, or what to add to i for the i-th one if they `are_offsets`;
    `size` names the draft vocabulary's size in error messages.

    Raises:
        CheckpointError: there is no such tensor where one is needed, or it is not such ids.
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
    """Return a head and its parameters without an embedding that equals the target's."""
    if not head.has_embedding:
        return head, params
    shared = target.embed(target_params, jnp.arange(target.vocab_size))
    own = params.embedding.values
    if shared.shape != own.shape or not bool((shared == own).all()):
        return head, params
    return replace(head, has_embedding=False), replace(params, embedding=None)
