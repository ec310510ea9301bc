"""Defaults of an engine's sizes and dtype, by device.

| | GPU | CPU |
|---|---|---|
| max_num_seqs | 256, fewer if their recurrent states do not fit | 16 |
| max_num_batched_tokens | 8192 | 512 |
| max_model_len | the model's own | the model's own, at most 8192 |
| dtype | the checkpoint's; float32 before compute capability 8.0 | float32 |

A GPU reads all weights in each step, regardless of the number of tokens, so large steps cost little
more than small steps. The engine has a GPU's memory to itself, so most memory that the weights
leave free is for pages. On a CPU, the time of a step grows with its number of tokens, so a large
step makes other requests wait. A CPU has no fast bfloat16, and other programs share its memory.
"""

from collections.abc import Mapping
from functools import partial
from os import PathLike
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.capability import compute_capability
from pallas_kernels.dispatch import why_not
from pallas_kernels.rms_norm import add_rms_norm
from specjax.checkpoint.errors import CheckpointError
from specjax.checkpoint.quantised.bits import BITS
from specjax.checks import is_integer, warn
from specjax.config import (
    DTYPES,
    EngineConfig,
    check_flags,
    check_positive,
    is_number,
)
from specjax.device.models.hf_config import HFConfig
from specjax.device.models.model import Model
from specjax.device.placement import default_device

_ALIASES = {"float": "float32"}  # as in vLLM, like the next mapping
_LOGPROBS_ALIASES = {"raw_logprobs": "raw", "processed_logprobs": "processed"}
_NARROW = ("float16", "half")
# The dtypes that a checkpoint's config can name, and values that do not name one: 8-bit checkpoints
# can have the dtype of their quantised weights, which says nothing about the other weights.
_STORED = (*DTYPES, *_ALIASES, *_NARROW, "float64", "double")
_UNNAMED = (None, "auto", "float8_e4m3fn")
# A page may have this many tokens even if max_model_len is less, as the default page_size may, too.
LARGE_PAGE = 256


class Defaults(NamedTuple):
    """The values that replace None in options, and the dtype for dtype="auto"."""

    max_num_seqs: int
    max_num_batched_tokens: int
    longest: int | None  # the default max_model_len is at most this; None for no limit
    dtype: str | None  # None for the dtype of the checkpoint

    def model_len(self, max_position: int) -> int:
        """Return the default max_model_len of a model with `max_position` positions."""
        return max_position if self.longest is None else min(max_position, self.longest)


DEFAULTS: Mapping[str, Defaults] = {
    "gpu": Defaults(256, 8192, None, None),
    "cpu": Defaults(16, 512, 8192, "float32"),
}


def device_defaults() -> Defaults:
    """Return the defaults of the device that engines run on."""
    return DEFAULTS["cpu" if default_device().platform == "cpu" else "gpu"]


def check_options(
    *,
    nnodes: int,
    tensor_parallel_size: Any,
    data_parallel_size: Any,
    enable_expert_parallel: Any,
    quantization: Any,
    gpu_memory_utilization: Any,
    compilation_cache: Any,
    verbose: Any,
) -> None:
    """Check the options of an LLM that are not fields of `EngineConfig`.

    Raises:
        ValueError: an option is invalid; the message says which values are allowed.
    """
    num_devices = jax.local_device_count() * nnodes
    if not is_integer(tensor_parallel_size) or not 1 <= tensor_parallel_size <= num_devices:
        raise ValueError(
            f"tensor_parallel_size={tensor_parallel_size!r} must be an integer from 1 to "
            f"{num_devices}, the number of devices"
        )
    most = num_devices // tensor_parallel_size
    if not is_integer(data_parallel_size) or not 1 <= data_parallel_size <= most:
        raise ValueError(
            f"data_parallel_size={data_parallel_size!r} must be an integer from 1 to {most}: there "
            f"are {num_devices} devices, and each replica has {tensor_parallel_size} of them "
            "(tensor_parallel_size)"
        )
    if quantization is not None and quantization not in tuple(BITS):  # it may have no hash
        raise ValueError(
            f"quantization={quantization!r} is not supported; choose one of {', '.join(BITS)} "
            "for a plain checkpoint, or leave it out: quantised checkpoints stay as they are"
        )
    if not is_number(gpu_memory_utilization) or not 0 < gpu_memory_utilization <= 1:
        raise ValueError(
            f"gpu_memory_utilization={gpu_memory_utilization!r} must be in (0, 1], the fraction of "
            "a GPU's memory to use"
        )
    if compilation_cache == "" or not isinstance(compilation_cache, str | PathLike | None):
        raise ValueError(
            f"compilation_cache={compilation_cache!r} must be a folder's path, or None"
        )
    check_flags(verbose=verbose, enable_expert_parallel=enable_expert_parallel)


def make_config(
    target: Model,
    *,
    max_model_len: int | None,
    max_num_seqs: int | None,
    max_num_batched_tokens: int | None,
    num_pages: int | None,
    page_size: int,
    logprobs_mode: str = "raw",
    **others: Any,
) -> EngineConfig:
    """Return an engine's config, with the device's defaults instead of None.

    If `num_pages` is None, the config has the pages that one request of full length needs. The
    final number depends on the drafter, which is not known yet.

    Raises:
        ValueError: sizes contradict each other or do not fit the model.
    """
    usual = device_defaults()
    if max_model_len is None:
        max_model_len = usual.model_len(target.max_position)
    if max_num_seqs is None:
        max_num_seqs = usual.max_num_seqs
    if max_num_batched_tokens is None:
        max_num_batched_tokens = usual.max_num_batched_tokens
    check_positive(max_model_len=max_model_len, max_num_seqs=max_num_seqs, page_size=page_size)
    if max_model_len > target.max_position:
        raise ValueError(
            f"max_model_len={max_model_len} exceeds the {target.max_position} positions that the "
            "model was made for; lower it"
        )
    if page_size > (largest := max(max_model_len, LARGE_PAGE)):
        raise ValueError(
            f"page_size={page_size} must be at most {largest}, as max_model_len={max_model_len}: "
            "the rest of a page would stay empty; lower it"
        )
    return EngineConfig(
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        num_pages=-(-max_model_len // page_size) if num_pages is None else num_pages,
        page_size=page_size,
        logprobs_mode=_LOGPROBS_ALIASES.get(str(logprobs_mode), logprobs_mode),
        **others,
    )


class DtypeChoice(NamedTuple):
    """A dtype, and the reason for it."""

    name: str
    reason: str


def choose_dtype(given: Any, stored: str | None) -> DtypeChoice:
    """Return the dtype of an engine, and the reason for it. `given` is the option `dtype`.

    "auto" depends on the device and on `stored`, the checkpoint's dtype.

    Raises:
        ValueError: the dtype is not supported; the message says why.
    """
    if given != "auto":
        name = _ALIASES.get(given, given) if isinstance(given, str) else given
        if name in _NARROW:
            raise ValueError(
                f"dtype={given!r} is not supported: values beyond 65504 overflow it, and models "
                "made in bfloat16 have such; use 'bfloat16', which takes as much memory"
            )
        if name not in DTYPES:
            choices = ", ".join(("auto", *DTYPES, *_ALIASES))
            raise ValueError(f"dtype={given!r} is not supported; choose one of {choices}")
        if name == "bfloat16" and (card := _card_without_bfloat16()):
            raise ValueError(f"dtype={given!r} is not supported by {card}; use 'float32'")
        return DtypeChoice(name, "as asked for")
    own = device_defaults().dtype
    if own is not None:
        return DtypeChoice(own, "auto, as a CPU has no fast bfloat16")
    if stored in (*_NARROW, "bfloat16") and (card := _card_without_bfloat16()):
        return DtypeChoice("float32", f"auto, as {card} has no bfloat16")
    if stored in _NARROW:
        return DtypeChoice(
            "bfloat16", f"auto, as the checkpoint is in {stored}, which is not served"
        )
    if stored in DTYPES:
        return DtypeChoice(stored, "auto, the checkpoint's")
    return DtypeChoice("float32", f"auto, as the checkpoint says dtype={stored!r}")


def _card_without_bfloat16() -> str | None:
    capability = compute_capability()
    if capability is None or capability >= (8, 0):
        return None
    return "a GPU of compute capability {}.{}".format(*capability)


def choose_kernels(given: str) -> str:
    """Return the implementation of the GPU operations. `given` is the option `kernels`.

    If the device should support Triton but a small trial kernel fails, e.g. because of an outdated
    driver, return "reference" and warn.
    """
    if given not in ("auto", "triton") or why_not("triton") is not None:
        return given
    row = jnp.ones((1, 16))
    try:
        run = jax.jit(partial(add_rms_norm, eps=1e-6, kernels="triton"))
        jax.block_until_ready(run(row, row, row[0]))
    except Exception as error:  # the driver, XLA or Triton may raise anything
        message = str(error).strip().partition("\n")[0]
        warn(
            f"kernels={given!r}: a kernel fails on this device ({message}); plain JAX runs, "
            "which is slower. Update the driver, or set kernels='reference'",
        )
        return "reference"
    return given


def stored_dtype(hf: HFConfig) -> str | None:
    """Return the dtype that a checkpoint's config names for weights; None if it names none.

    Raises:
        CheckpointError: unquantised weights cannot have the dtype.
    """
    nested = hf.get("text_config", None)
    inner = HFConfig(nested if isinstance(nested, Mapping) else {}, f"{hf.origin}: text_config")
    for part in inner, hf:
        for name in "dtype", "torch_dtype":
            given: Any = part.get(name, None)
            dtype = given.removeprefix("torch.") if isinstance(given, str) else given
            if dtype in _UNNAMED:
                continue
            if dtype not in _STORED:
                raise CheckpointError(
                    f"{part.origin}: {name}={given!r} is not a dtype of unquantised weights; write "
                    f"one of {', '.join(_STORED)}, or remove the field"
                )
            return _ALIASES.get(dtype, dtype)
    return None


def params_dtype(params: Any) -> str | None:
    """Return the dtype of the largest floating-point array in a tree; None if it has none."""
    floats = [x for x in jax.tree.leaves(params) if jnp.issubdtype(x.dtype, jnp.floating)]
    return str(max(floats, key=lambda x: x.size).dtype) if floats else None
