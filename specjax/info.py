"""`specjax info`: what a checkpoint is, and what serving it takes."""

import argparse
import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from specjax.arguments import read_speculation
from specjax.checkpoint.files import open_checkpoint
from specjax.checkpoint.hub import resolve
from specjax.config import DTYPES, EngineConfig, SpeculativeConfig
from specjax.demo import locate
from specjax.device.drafters.registry import load_drafter
from specjax.device.models.model import Model
from specjax.device.models.registry import describe_model, read_config
from specjax.environment import describe_environment
from specjax.llm import default_num_pages
from specjax.tokenizer import load_tokenizer

_MAX_NUM_SEQS = 16
_GPU_MEMORY_UTILIZATION = 0.9


def run(args: argparse.Namespace) -> int:
    """Carry out `specjax info`."""
    folder = resolve(locate(args.model))
    hf = read_config(folder)
    target = describe_model(hf)
    speculation = read_speculation(args)
    drafter = speculation and describe_drafter(
        SpeculativeConfig.of(speculation), target, args.dtype
    )
    tokenizer = load_tokenizer(folder)
    report = {
        "model": {
            "folder": str(folder),
            "model_type": hf.get("model_type", None),
            **(asdict(target) if is_dataclass(target) else {}),
            "has_tokenizer": tokenizer is not None,
            "has_chat_template": tokenizer is not None and tokenizer.template is not None,
        },
        "weights": describe_weights(folder, target),
        "drafter": drafter,
        "cache": describe_cache(
            target,
            drafter["kv_bytes_per_token"] if drafter else 0,
            dtype=args.dtype,
            max_model_len=args.max_model_len,
            max_num_seqs=_MAX_NUM_SEQS if args.max_num_seqs is None else args.max_num_seqs,
            page_size=args.page_size,
        ),
        "environment": describe_environment(),
    }
    print(json.dumps(report, indent=2) if args.json else "\n".join(as_lines(report)))
    return 0


def describe_weights(folder: Path, target: Model) -> dict[str, Any]:
    """Parameters, and their bytes as stored and in each dtype that can be loaded."""
    stored: Counter[str] = Counter()
    for tensor in open_checkpoint(folder).tensors.values():
        stored[str(tensor.dtype)] += math.prod(tensor.shape) * tensor.dtype.itemsize
    num_parameters = sum(math.prod(spec.shape) for spec in jax.tree.leaves(target.specs()))
    return {
        "num_parameters": num_parameters,
        "stored_bytes": dict(stored),
        "loaded_bytes": {name: num_parameters * np.dtype(name).itemsize for name in DTYPES},
    }


def describe_drafter(config: SpeculativeConfig, target: Model, dtype: str) -> dict[str, Any]:
    """The drafter, after checking that it fits the target."""
    folder = resolve(config.model)
    drafter, params = load_drafter(folder, config, target, np.dtype(dtype))
    floats = [x for x in jax.tree.leaves(params) if jax.numpy.issubdtype(x.dtype, np.floating)]
    shape = drafter.head.shape
    return {
        "folder": str(folder),
        "method": config.method,
        "num_speculative_tokens": config.num_speculative_tokens,
        "num_parameters": sum(x.size for x in floats),
        "aux_layers": list(drafter.aux_layers),
        "kv_bytes_per_token": kv_bytes(1, shape.num_kv_heads, shape.head_dim, dtype),
    }


def kv_bytes(num_layers: int, num_kv_heads: int, head_dim: int, dtype: str) -> int:
    """Bytes that keys and values of one token take."""
    return num_layers * 2 * num_kv_heads * head_dim * np.dtype(dtype).itemsize


def describe_cache(
    target: Model,
    drafter_bytes: int,
    *,
    dtype: str,
    max_model_len: int | None,
    max_num_seqs: int,
    page_size: int,
) -> dict[str, Any]:
    """The pool that an engine of these sizes would have on this device."""
    if max_model_len is None:
        max_model_len = min(target.max_position, 8192)
    if max_model_len > target.max_position:
        raise ValueError(
            f"max_model_len={max_model_len} exceeds the {target.max_position} positions that the "
            "model was made for; lower it"
        )

    def configure(num_pages: int) -> EngineConfig:
        return EngineConfig(
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            page_size=page_size,
            num_pages=num_pages,
            dtype=dtype,
        )

    configure(num_pages=max(1, max_model_len))  # checks the sizes
    num_pages = default_num_pages(
        target, dtype, page_size, max_model_len, max_num_seqs, _GPU_MEMORY_UTILIZATION
    )
    config = configure(num_pages)
    target_bytes = kv_bytes(target.num_layers, target.num_kv_heads, target.head_dim, dtype)
    return {
        "max_model_len": max_model_len,
        "max_num_seqs": max_num_seqs,
        "page_size": page_size,
        "dtype": dtype,
        "kv_bytes_per_token": target_bytes + drafter_bytes,
        "num_pages": num_pages,
        "pages_per_request": config.pages_per_seq,
        "max_full_length_requests": min(max_num_seqs, num_pages // config.pages_per_seq),
        "pool_bytes": num_pages * page_size * (target_bytes + drafter_bytes),
    }


def as_lines(report: Mapping[str, Any]) -> Iterator[str]:
    """The report as text, a section per key."""
    for section, values in report.items():
        if values is None:
            continue
        yield section
        for key, value in values.items():
            yield f"  {key.replace('_', ' '):26}{as_text(key, value)}"


def as_text(key: str, value: Any) -> str:
    """A value as text; counts of bytes and parameters in readable units."""
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {as_text(key, item)}" for name, item in value.items())
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int) and "bytes" in key:
        return f"{value / 2**20:.1f} MiB" if value >= 2**20 else f"{value:,} bytes"
    return f"{value:,}" if isinstance(value, int) else str(value)
