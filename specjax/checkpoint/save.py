"""Exports parameters to a Hugging Face folder, one tensor at a time."""

import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.checkpoint import safetensors_file
from specjax.checkpoint.spec import TensorSpec
from specjax.checkpoint.writing import naming

FILE = "model.safetensors"  # the usual name of the file with a checkpoint's weights
_TEXT_FILES = (
    *("tokenizer*", "special_tokens_map.json", "added_tokens.json"),
    *("*.jinja", "additional_chat_templates/*.jinja", "generation_config.json"),
)


def save_checkpoint(
    folder: Path,
    specs: Any,
    params: Any,
    config: Mapping[str, Any],
    *,
    dtype: np.dtype,
    extra: Mapping[str, np.ndarray] = {},
    file: str = FILE,
) -> None:
    """Write `params`, cast to `dtype`, to the file `file`, and write `config` to config.json.

    An array whose spec has a dtype is cast to this dtype instead. Each file is written atomically.
    If the arrays have these dtypes already, loading the file returns the same bits.

    Args:
        specs: a tree of `TensorSpec`s, with the structure of `params`.
        extra: more tensors, by their name in the file; they keep their dtypes.
        file: the name of the safetensors file.

    Raises:
        ValueError: `params` do not fit `specs`, a name is used twice, or `folder` contains a
            sharded checkpoint that would hide the new file.
        OSError: there is no space or no permission; the error names the folder.
    """
    folder, dtype = Path(folder), np.dtype(dtype)
    text = json.dumps(dict(config), indent=2) + "\n"
    pairs = _pair(specs, params)
    layout = _layout([spec for spec, _ in pairs], dtype, extra)
    index = folder / "model.safetensors.index.json"
    if index.exists():
        raise ValueError(f"{index} would hide the new {file}; save to another folder")
    with naming(folder):
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".saving-") as temporary:
            weights, json_file = (Path(temporary, n) for n in (file, "config.json"))
            safetensors_file.write(weights, layout, _tensors(pairs, dtype, extra))
            json_file.write_text(text)
            for path in (weights, json_file):
                os.replace(path, folder / path.name)


def copy_tokenizer(source: Path, folder: Path) -> None:
    """Copy a checkpoint's tokenizer, chat template and generation config."""
    for pattern in _TEXT_FILES:
        for path in source.glob(pattern):
            copy = folder / path.relative_to(source)
            copy.parent.mkdir(exist_ok=True)
            shutil.copyfile(path, copy)


def _pair(specs: Any, params: Any) -> list[tuple[TensorSpec, jax.Array]]:
    expected, found = jax.tree.structure(specs), jax.tree.structure(params)
    if expected != found:
        raise ValueError(f"params have the structure {found}, but the model's is {expected}")
    pairs = list(zip(jax.tree.leaves(specs), jax.tree.leaves(params), strict=True))
    for spec, array in pairs:
        if array.shape != spec.shape:
            raise ValueError(
                f"the array of {', '.join(spec.names)} has shape {list(array.shape)}, "
                f"the model's is {list(spec.shape)}; save with the specs of the params' own model"
            )
    return pairs


def _layout(
    specs: list[TensorSpec], dtype: np.dtype, extra: Mapping[str, np.ndarray]
) -> dict[str, tuple[np.dtype, tuple[int, ...]]]:
    entries = [
        (name, (np.dtype(spec.dtype or dtype), shape))
        for spec in specs
        for name, shape in zip(spec.names, spec.file_shapes, strict=True)
    ]
    entries += [(name, (tensor.dtype, tensor.shape)) for name, tensor in extra.items()]
    layout = dict(entries)
    if len(layout) < len(entries):
        names = [name for name, _ in entries]
        twice = sorted({name for name in names if names.count(name) > 1})
        raise ValueError(f"{', '.join(twice)} would be written twice; rename one in specs or extra")
    return layout


def _tensors(
    pairs: list[tuple[TensorSpec, jax.Array]], dtype: np.dtype, extra: Mapping[str, np.ndarray]
) -> Iterator[tuple[str, np.ndarray]]:
    for spec, array in pairs:
        # Copy, because JAX caches an array's host version as long as the array lives.
        kept = jnp.array(array, spec.dtype or dtype, copy=True)
        for name, tensor in spec.split(np.asarray(kept)).items():
            yield name, np.ascontiguousarray(tensor)
    yield from extra.items()
