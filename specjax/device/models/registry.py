"""The registry of models by the `model_type` of their config."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from specjax.checkpoint.config_json import read_json
from specjax.checkpoint.errors import CheckpointError
from specjax.checkpoint.files import TensorFiles, open_checkpoint
from specjax.checkpoint.given import as_arrays
from specjax.checkpoint.hub import resolve
from specjax.checkpoint.kv_scales import is_kv_scale
from specjax.checkpoint.quantised.registry import read_format, refuse_quantised
from specjax.checkpoint.quantised.rounding import RoundedFiles
from specjax.checkpoint.save import copy_tokenizer, save_checkpoint
from specjax.checks import did_you_mean
from specjax.device.loading import Log, keep_name, load_params, no_log
from specjax.device.models import arcee, deepseek_v3, gemma, glm4_moe, gpt_oss, llama, qwen3_5
from specjax.device.models.config_fields import (
    QUANTISATION,
    check_fields,
    check_plain,
    quantisation,
)
from specjax.device.models.hf_config import HFConfig
from specjax.device.models.model import Model
from specjax.device.models.tensor_names import (
    EMBEDDING,
    HEAD,
    TensorNames,
    as_groups,
    is_head,
    is_rotary,
    is_within,
    other_part,
)
from specjax.device.models.text_config import WRAPPERS, read_text
from specjax.device.parallel import Divisible, specs_of
from specjax.device.placement import Placement
from specjax.device.weights.rounded import rounded
from specjax.device.weights.stored import as_stored, dequantise, unpacked

MODELS: dict[str, Callable[[HFConfig], Model]] = {
    "llama": llama.from_hf,
    "mistral": llama.from_hf,
    "ministral": llama.from_hf,
    "ministral3": llama.from_hf,
    "qwen2": llama.from_hf,
    "qwen3": llama.from_hf,
    "qwen3_moe": llama.from_hf,
    "phi3": llama.from_hf,
    "arcee": arcee.from_hf,
    "gemma2": gemma.from_hf,
    "gemma3_text": gemma.from_hf,
    "gpt_oss": gpt_oss.from_hf,
    "qwen3_next": qwen3_5.from_hf,
    "qwen3_5_text": qwen3_5.from_hf,
    "qwen3_5_moe_text": qwen3_5.from_hf,
    "deepseek_v3": deepseek_v3.from_hf,
    "glm4_moe": glm4_moe.from_hf,
    "glm4_moe_lite": deepseek_v3.from_hf,
}
KINDS = (*MODELS, *WRAPPERS)  # supported values of `model_type`


def read_config(folder: Path) -> HFConfig:
    """Read the config of a checkpoint folder."""
    return HFConfig(read_json(folder, "config.json"), str(folder / "config.json"))


def describe_model(hf: HFConfig) -> Model:
    """Return the model that a config describes, without weights.

    If the config describes several parts, only the text model is returned.
    """
    text = read_text(hf)
    kind = text.get("model_type", None)
    if not isinstance(kind, str) or kind not in MODELS:
        raise CheckpointError(
            f"{text.origin}: model_type={kind!r} is not supported; supported: {', '.join(KINDS)}"
            f"{did_you_mean(kind, KINDS)}"
        )
    check_fields(hf, text)
    return MODELS[kind](text)


def describe_checkpoint(folder: Path, hf: HFConfig, log: Log = no_log) -> Model:
    """Return the model in a checkpoint folder, without weights.

    Some configs tie the output head to the embedding although the files have a different output
    head. Then the model is not tied, as in transformers, and the log says so.
    """
    model: Any = describe_model(hf)
    if not is_tied(model):
        return model
    files = open_checkpoint(folder)
    names = TensorNames.of(files.names())
    embedding, head = names.stored(EMBEDDING), names.stored(HEAD)
    if not {embedding, head} <= files.names() or files.equal(embedding, head):
        return model
    log(
        f"{folder}: {head} differs from {embedding}, so the output head is not tied, "
        "although tie_word_embeddings is true"
    )
    return replace(model, tie_word_embeddings=False)


def load_model(
    folder: Path, dtype: np.dtype, placement: Placement | None = None, log: Log = no_log
) -> tuple[Model, Any]:
    """Load a checkpoint folder's model and its parameters in `dtype`; see `load_weights`."""
    model: Any = describe_checkpoint(folder, read_config(folder), log)
    if placement is not None:
        model = replace(model, num_devices=placement.num_devices)
    return model, load_weights(folder, model, dtype, placement, log)


def load_weights(
    folder: Path,
    model: Model,
    dtype: np.dtype,
    placement: Placement | None = None,
    log: Log = no_log,
    quantization: str | None = None,
) -> Any:
    """Load the parameters of `model` from its checkpoint folder; see `load_params`.

    The log lists tensors that are ignored, tensors that are unpacked, and rotary frequencies that
    differ from the config's. If `quantization` is set, the weights of an unquantised checkpoint are
    quantised, and the log also gives the largest relative error over all matrices.
    """
    stored, hf = open_checkpoint(folder), read_config(folder)
    files = find_scales(stored, hf, dtype)
    specs = named_specs(model, files.shapes())
    made = None
    if quantization is not None:
        made = rounded(specs, files, quantization, np.dtype(dtype))
        files = made.files
    params = load_params(files, specs, dtype, placement=placement, ignore=partial(is_unused, model))
    if made is not None:
        log(f"{folder}: {made.describe(str(quantization))}")
    if read_format(quantisation(hf)[1]) and files.tensors == stored.tensors:
        log(
            f"{folder}: config.json says that weights are quantised, but no tensor is; they are "
            "loaded as they are"
        )
    if narrow := unpacked(specs, files, keep_name):
        log(
            f"{folder}: {len(narrow)} quantised tensors, such as {narrow[0]}, are unpacked to "
            f"{np.dtype(dtype)}: their kind of weight, or a device's part of it, has no form with "
            "the stored numbers"
        )
    if passed := [name for name in files.names() if is_passed_over(model, name)]:
        log(f"{folder}: not loaded, not part of the text model: {as_groups(passed)}")
    _compare_rotary(files, model, log)
    return params


def _compare_rotary(files: TensorFiles, model: Any, log: Log) -> None:
    """Log which tensors of rotary frequencies differ from the config's frequencies."""
    own = model.rope.inverse_frequencies()
    differ = [
        name
        for name in sorted(filter(is_rotary, files.names()))
        if files.shape(name) != own.shape
        # The tolerance allows for half precision: three digits.
        or not np.allclose(files.read(name).astype(np.float32), own, rtol=1e-2, atol=0)
    ]
    if differ:
        log(
            f"{files.folder}: {differ[0]} and {len(differ) - 1} more differ from the rotary "
            "frequencies of config.json, which are used"
        )


def save_model(folder: str | Path, model: Model, params: Any, source: str | Path) -> None:
    """Write a model's parameters as a checkpoint that this package and transformers can load.

    Weights are stored unquantised in the embedding's dtype; some kinds of weights are always f32. A
    vision tower and MTP modules are left out.

    Args:
        source: the checkpoint that the model was read from (a folder, hub id or demo name). Its
            config and tokenizer are copied.

    Raises:
        ValueError: `params` do not match the model, or contain an array that cannot be read.
        CheckpointError: `source` cannot be read, or is a checkpoint of another model.
        OSError: there is no space or no permission; the message names the folder.
    """
    origin, folder = resolve(source), Path(folder)
    hf = read_config(origin)
    config = plain_config(hf, is_tied=is_tied(model))
    whole: Any = replace(model, num_devices=1, divides_experts=False)  # pyright: ignore
    if describe_checkpoint(origin, hf) != whole.with_pages((), ()):
        raise CheckpointError(
            f"{origin} is not the checkpoint of the model to save; name the model's own checkpoint"
        )
    params = as_arrays(params, "params")
    dtype = np.dtype(params.embedding.dtype)
    params = dequantise(params, dtype)
    save_checkpoint(folder, specs_of(model), params, config | {"dtype": dtype.name}, dtype=dtype)
    copy_tokenizer(origin, folder)


def open_weights(folder: Path, hf: HFConfig, dtype: np.dtype) -> TensorFiles:
    """Open a checkpoint folder's weights, with one tensor for each quantised matrix.

    See `find_scales`.
    """
    return find_scales(open_checkpoint(folder), hf, dtype)


def stored_specs(
    folder: Path, model: Model, quantization: str | None = None, dtype: str | None = None
) -> Any:
    """Return the `TensorSpec`s for loading a model's parameters from a checkpoint folder.

    The `TensorSpec`s describe weights in the form in which the folder stores them, for example
    4-bit numbers with scales. If `quantization` is set, they describe the weights after
    quantisation. A quantised embedding's rows are dequantised to `dtype`; None for float32.
    """
    files = open_weights(folder, read_config(folder), np.dtype(dtype or "float32"))
    specs = named_specs(model, files.shapes())
    if quantization is not None:
        files = rounded(specs, files, quantization, np.dtype(np.float32)).files
    return as_stored(specs, files, keep_name)


def rounded_files(folder: Path, quantization: str) -> RoundedFiles:
    """Return an unquantised checkpoint's files, quantised when they are read; see `rounded`.

    Raises:
        ValueError: the checkpoint is quantised.
        CheckpointError: the checkpoint's model is not supported.
    """
    hf = read_config(folder)
    check_plain(hf, quantization)
    files = find_scales(open_checkpoint(folder), hf, np.dtype(np.float32))
    specs = named_specs(describe_checkpoint(folder, hf), files.shapes())
    return rounded(specs, files, quantization, np.dtype(np.float32))


def find_scales(files: TensorFiles, hf: HFConfig, dtype: np.dtype) -> TensorFiles:
    """Return `files`, with one tensor for each quantised matrix and its scales; see `Format.join`.

    Reading such a tensor returns the unquantised matrix in `dtype`.

    Raises:
        CheckpointError: there are quantised tensors, but the config does not mention any.
    """
    given = quantisation(hf)[1]
    if not given:
        refuse_quantised(files)
    form = read_format(given)
    return files if form is None else form.join(files, dtype)


def plain_config(hf: HFConfig, *, is_tied: bool) -> dict[str, Any]:
    """Return the config for saving only a checkpoint's text model, with unquantised weights.

    The saved tensors must have the names in the model's `TensorSpec`s. `is_tied` says whether the
    output head is the embedding.
    """
    text = read_text(hf)
    plain = {name: value for name, value in text.fields.items() if name not in QUANTISATION}
    if text.get("model_type", None) != hf.get("model_type", None):
        plain.pop("architectures", None)
    return plain | {"tie_word_embeddings": is_tied}


def is_tied(model: Any) -> bool:
    """Return whether a model's output head is its embedding."""
    return getattr(model, "tie_word_embeddings", False)


def named_specs(
    model: Divisible,
    shapes: Mapping[str, tuple[int, ...]],
    read: Callable[[Any, Mapping[str, tuple[int, ...]]], Any] = specs_of,
) -> Any:
    """Return a model's `TensorSpec`s with the tensor names of a checkpoint or a trainer.

    These names can have other prefixes than the model's own names; see `TensorNames`.

    Args:
        model: a model, or a part of a model.
        shapes: the shapes of the checkpoint's or the trainer's tensors, by name. They determine the
            layout of experts.
        read: a function that takes `model`, and the shapes by the model's own names. It returns
            `TensorSpec`s with the model's own names.
    """
    names = TensorNames.of(shapes)
    specs = read(model, {names.canonical(name): shape for name, shape in shapes.items()})
    # A tied embedding may be stored only as the output head.
    lacks = (
        is_tied(model) and names.stored(EMBEDDING) not in shapes and names.stored(HEAD) in shapes
    )

    def stored(name: str) -> str:
        return names.stored(HEAD if lacks and name == EMBEDDING else name)

    return jax.tree.map(lambda spec: replace(spec, names=tuple(map(stored, spec.names))), specs)


def is_unused(model: Model, name: str) -> bool:
    """Return whether the model ignores the tensor `name` of a checkpoint.

    Ignored tensors are tensors outside the text model, rotary frequencies, scales of KV caches, and
    an output head that is tied to the embedding.
    """
    # With tied embeddings the output head may be stored as well.
    is_copy = is_tied(model) and is_head(name)
    return is_rotary(name) or is_kv_scale(name) or is_copy or is_passed_over(model, name)


def is_passed_over(model: Model, name: str) -> bool:
    """Return whether the checkpoint's tensor `name` is outside the text model."""
    return other_part(name) is not None or is_within(name, model.ignored_prefixes)
