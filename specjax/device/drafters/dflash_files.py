"""Reads the files of DFlash heads.

A head has the layout of DFlash's authors, of the library speculators or of transformers.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from specjax.checkpoint import torch_pickle
from specjax.checkpoint.errors import CheckpointError
from specjax.checkpoint.files import TensorFiles, open_checkpoint
from specjax.config import SpeculativeConfig
from specjax.device.drafters import dflash2, dspark
from specjax.device.drafters.checkpoint import DrafterFiles, read_target_ids
from specjax.device.drafters.dflash import (
    MASK_EMBEDDING,
    UNUSED,
    AttentionMask,
    DFlashDrafter,
    DFlashHead,
    DFlashParams,
    Refinement,
    first_layer,
)
from specjax.device.loading import Log
from specjax.device.models import llama
from specjax.device.models.config_fields import refuse_quantised
from specjax.device.models.hf_config import HFConfig
from specjax.device.models.llama import Llama
from specjax.device.models.model import Model
from specjax.device.models.registry import read_config
from specjax.device.models.windows import FULL, SLIDING, check_layer_types
from specjax.device.parallel import specs_of
from specjax.device.placement import Placement

# Functions that read an addition to DFlash, by architecture or by speculators' model type.
READERS: dict[str, Callable[..., tuple[Refinement, int]]] = {
    "DFlash2DraftModel": dflash2.read,
    "DSparkDraftModel": dspark.read,
    "Qwen3DSparkModel": dspark.read,
    "dspark": dspark.read,
}
OF_TRANSFORMERS = "muse_glimmer_assistant"  # the model type in transformers' layout
MASK_FILE = "mask_embedding.pt"  # holds a tensor "embedding" and an id
# Fields of unsupported features, and the value that turns each off.
_UNSUPPORTED = {
    "attention_sink_bias": False,
    "attention_value_scale": 1.0,
    "is_neox_style": True,
    "logit_scale": 1.0,
    "use_aux_hidden_state": True,
}
# Names of the field with the mask's token id; the first one that is set counts.
_MASK_FIELDS = "mask_token_id", "dspark_noise_token_id", "pard_token", "ptd_token_id"
_WINDOWS = "layer_types", "sliding_window", "use_sliding_window", "max_window_layers"


def load(
    folder: Path | None,
    config: SpeculativeConfig,
    target: Model,
    dtype: np.dtype,
    placement: Placement,
    log: Log,
) -> tuple[DFlashDrafter, DFlashParams]:
    """Load a head from a folder in one of the layouts that this file's docstring lists.

    Raises:
        CheckpointError: the head was made for another target, makes fewer drafts than `config`
            asks for, or is of an unsupported kind.
    """
    assert folder is not None, config.method
    files = DrafterFiles(_open(folder), read_config(folder), placement, log)
    head = _read_head(files, config, target)
    params = files.load(specs_of(head, files.tensors.names()), dtype, unused=UNUSED)
    ids = read_target_ids(files, head.draft_vocab_size, target)
    drafter = DFlashDrafter(head, is_greedy=config.draft_sample_method == "greedy")
    return drafter, replace(params, target_ids=ids)


def from_config(folder: Path, config: SpeculativeConfig, target: Model) -> DFlashDrafter:
    """Return a drafter with the sizes in `folder`'s config. The folder needs no weights.

    The drafter uses the target's embedding and vocabulary.

    Raises:
        CheckpointError: see `load`.
    """
    return DFlashDrafter(_read_head(DrafterFiles.without_weights(folder), config, target))


def _read_head(files: DrafterFiles, config: SpeculativeConfig, target: Model) -> DFlashHead:
    hf = files.hf
    refuse_quantised(hf)
    _refuse_unsupported(hf)
    shape = _read_shape(hf, files, target.vocab_size)
    shape = replace(shape, num_devices=target.num_devices)
    refinement, first_row = _read_refinement(hf)
    head = DFlashHead(
        shape=shape,
        target_hidden_size=target.hidden_size,
        draft_vocab_size=hf.integer("draft_vocab_size", shape.vocab_size),
        aux_layers=_read_aux_layers(hf, target.num_layers, shape.num_layers),
        mask_token_id=_read_mask(hf, target),
        attention_masks=_read_attention_masks(hf, shape.num_layers),
        has_embedding=files.has("embed_tokens.weight"),
        has_lm_head=files.has("lm_head.weight"),
        has_mask=files.has(MASK_EMBEDDING),
        refinement=refinement,
        first_row=first_row,
    )
    _check(files, head, config, target)
    return head


def _open(folder: Path) -> TensorFiles:
    """Open the weights, including a mask embedding in a separate file."""
    files, path = open_checkpoint(folder), folder / MASK_FILE
    if not path.exists():
        return files
    own = torch_pickle.locate(path, ignored=("mask_token_id",))
    if "embedding" not in own:
        raise CheckpointError(f"{path} must contain the tensor 'embedding'; it has {sorted(own)}")
    return replace(files, tensors={**files.tensors, MASK_EMBEDDING: own["embedding"]})


def _refuse_unsupported(hf: HFConfig) -> None:
    for name, usual in _UNSUPPORTED.items():
        _refuse_unusual(hf, name, usual)


def _refuse_unusual(hf: HFConfig, name: str, usual: Any) -> None:
    value = _own(hf).get(name, hf.get(name, usual))
    if value is not None and value != usual:
        raise CheckpointError(
            f"{hf.origin}: {name}={value!r} is not supported; use a head with {usual!r}"
        )


def _read_refinement(hf: HFConfig) -> tuple[Refinement, int]:
    """Return the head's `Refinement`, and the index of the first row that gives a draft."""
    names = hf.get("speculators_model_type", None), *hf.get("architectures", [])
    read = next((READERS[name] for name in names if name in READERS), None)
    if read is not None:
        return read(hf, _own(hf))
    for name, usual in {"sample_from_anchor": False, "projector_type": "dflash"}.items():
        _refuse_unusual(hf, name, usual)
    return Refinement(), 1


def to_hf(head: DFlashHead, num_target_layers: int, block_size: int) -> dict[str, Any]:
    """Return a head's `config.json` in the authors' layout. The head must have no windows.

    The config allows at most `block_size - 1` drafts. `num_target_layers` is the target's number of
    layers.
    """
    return {
        **llama.to_hf(head.shape),
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "block_size": block_size,
        "num_target_layers": num_target_layers,
        "is_causal": all(mask.ahead == 0 for mask in head.attention_masks),
        "dflash_config": {
            "mask_token_id": head.mask_token_id,
            "target_layer_ids": [i - 1 for i in head.aux_layers],
        },
    }


def _own(hf: HFConfig) -> Mapping[str, Any]:
    return hf.get("dflash_config", {})


def _decoder(hf: HFConfig) -> Mapping[str, Any]:
    return hf.get("transformer_layer_config", hf.fields)


def _read_shape(hf: HFConfig, files: DrafterFiles, vocab_size: int) -> Llama:
    """Return the sizes of the head's decoder.

    `vocab_size` is used if the config has no vocabulary size.
    """
    fields = {"vocab_size": vocab_size, **_decoder(hf)}
    for name in _WINDOWS:  # these differ in heads: see `_read_attention_masks`
        fields.pop(name, None)
    shape = llama.from_hf(HFConfig({**fields, "model_type": "qwen3"}, hf.origin))
    if not files.tensors.names():
        return shape
    layer = f"{first_layer(files.tensors.names())}.self_attn"
    return replace(
        shape,
        qkv_bias=files.has(f"{layer}.q_proj.bias"),
        out_bias=files.has(f"{layer}.o_proj.bias"),
        qk_norm=files.has(f"{layer}.q_norm.weight"),
    )


def _read_attention_masks(hf: HFConfig, num_layers: int) -> tuple[AttentionMask, ...]:
    """Return the attention mask of a block's rows for each layer.

    In layers with a window of W tokens, a row attends to itself and to other positions. These
    depend on the training framework:

        speculators     the last W positions before the block, and in the block the rows before the
                        row, or all rows if `sliding_window_non_causal` is true
        transformers    W positions before the row, and W after it
        authors' code   W - 1 positions before the row, and W - 1 after it. If the mask is causal,
                        only the W - 1 positions before it

    Raises:
        CheckpointError: the window is missing or invalid, or the layer types are invalid.
    """
    windowed, window = _windowed_layers(hf, num_layers), _read_window(hf)
    if any(windowed) and window is None:
        raise CheckpointError(
            f"{hf.origin}: some layers have a sliding window, but sliding_window is not set"
        )
    given = hf.get("is_causal", _own(hf).get("causal"))
    is_marked = SLIDING in _layer_types(hf, num_layers)

    def mask(is_windowed: bool) -> AttentionMask:
        is_causal = is_windowed and is_marked if given is None else bool(given)
        if is_windowed and window is not None:
            if _is_of_transformers(hf):
                return AttentionMask(back=window, ahead=window)
            if "speculators_model_type" in hf.fields:
                sees_block = hf.flag("sliding_window_non_causal")
                return AttentionMask(back=window, ahead=None if sees_block else 0, is_anchored=True)
            return AttentionMask(back=window - 1, ahead=0 if is_causal else window - 1)
        return AttentionMask(ahead=0 if is_causal else None)

    return tuple(map(mask, windowed))


def _windowed_layers(hf: HFConfig, num_layers: int) -> list[bool]:
    types = _layer_types(hf, num_layers)
    check_layer_types(hf.origin, types, num_layers)
    is_everywhere = bool(_own(hf).get("use_swa")) and SLIDING not in types
    return [is_everywhere or one == SLIDING for one in types]


def _layer_types(hf: HFConfig, num_layers: int) -> list[str]:
    default = SLIDING if _is_of_transformers(hf) else FULL
    return _decoder(hf).get("layer_types") or [default] * num_layers


def _read_window(hf: HFConfig) -> int | None:
    window = _own(hf).get("swa_window_size", _decoder(hf).get("sliding_window"))
    if window is not None and (type(window) is not int or window < 1):
        raise CheckpointError(f"{hf.origin}: sliding window {window!r} must be at least 1")
    return window


def _is_of_transformers(hf: HFConfig) -> bool:
    return hf.get("model_type", "") == OF_TRANSFORMERS


def _read_aux_layers(hf: HFConfig, num_layers: int, num_own: int) -> tuple[int, ...]:
    """Return the indices of the target's layers whose input the head reads.

    The authors' configs list layers whose output is read; the output of layer i is the input of
    layer i + 1. Without a list, `num_own` layers are chosen, one for each layer of the head.

    Args:
        hf: the head's config.
        num_layers: the number of the target's layers.
        num_own: the number of the head's layers.

    Raises:
        CheckpointError: the target has no such layers.
    """
    entering = hf.get("aux_hidden_state_layer_ids", None)  # speculators' field
    outputs = _own(hf).get("target_layer_ids", hf.get("target_layer_ids", None))
    if entering is None and outputs is None:
        spread = max(num_own - 1, 1)
        outputs = [round(1 + i * (num_layers - 4) / spread) for i in range(num_own)]
        outputs = [num_layers // 2] if num_own == 1 else outputs
    layers = tuple(entering) if entering is not None else tuple(int(i) + 1 for i in outputs or ())
    if not layers or not all(0 <= i < num_layers for i in layers):
        raise CheckpointError(
            f"{hf.origin}: the head reads the outputs of layers {[i - 1 for i in layers]}, but the "
            f"target has 0..{num_layers - 1}, and the last layer's output is not supported (some "
            "frameworks take it before the final norm, some after); use another head"
        )
    return layers


def _read_mask(hf: HFConfig, target: Model) -> int:
    given = [_own(hf).get("mask_token_id"), *(hf.get(name, None) for name in _MASK_FIELDS)]
    token = next((one for one in given if one is not None), None)
    if not isinstance(token, int) or not 0 <= token < target.vocab_size:
        raise CheckpointError(
            f"{hf.origin}: mask_token_id={token!r} must be one of the target's "
            f"{target.vocab_size} tokens"
        )
    return token


def _check(files: DrafterFiles, head: DFlashHead, config: SpeculativeConfig, target: Model) -> None:
    hf, k = files.hf, config.num_speculative_tokens
    block = hf.integer("block_size", 16)
    most = block - head.first_row
    if most == 0:
        raise CheckpointError(f"{hf.origin}: block_size=1 leaves no drafts after the last token")
    if k > most:
        raise CheckpointError(
            f"{hf.origin}: block_size={block} allows at most {most} drafts; lower "
            f"speculative_config.num_speculative_tokens={k}"
        )
    if files.has("mask_hidden"):
        raise CheckpointError(
            f"{hf.origin}: mask_hidden belongs to P-EAGLE heads; use method 'p_eagle'"
        )
    is_whole = head.has_embedding and head.has_lm_head
    if not is_whole and head.shape.hidden_size != target.hidden_size:
        raise CheckpointError(
            f"{hf.origin}: the head is {head.shape.hidden_size} wide and uses the target's "
            f"embedding or output head, which is {target.hidden_size} wide; use a drafter trained "
            "for this target"
        )
    if head.shape.vocab_size != target.vocab_size:
        raise CheckpointError(
            f"{hf.origin}: vocab_size={head.shape.vocab_size} differs from the target's "
            f"{target.vocab_size}; use a drafter trained for this target"
        )
    if head.draft_vocab_size != head.shape.vocab_size and not head.has_lm_head:
        raise CheckpointError(
            f"{hf.origin}: draft_vocab_size={head.draft_vocab_size} needs a lm_head.weight, but "
            "the weights have none"
        )
