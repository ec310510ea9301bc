"""The options of an LLM by name, with types and defaults.

The docstring of `LLM` describes them. For most options, None and "auto" mean a default that depends
on the device or the model.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict

from specjax.checks import did_you_mean
from specjax.config import SpeculativeConfig
from specjax.serving.vllm_options import take_vllm_options


class LLMOptions(TypedDict, total=False):
    """Keyword arguments of `LLM`."""

    params: Any
    speculative_config: SpeculativeConfig | Mapping[str, Any] | None
    dtype: str
    quantization: str | None
    max_model_len: int | None
    max_num_seqs: int | None
    max_num_batched_tokens: int | None
    max_num_scheduled_tokens: int | None
    decode_batches: Sequence[int] | None
    prefill_shapes: Sequence[tuple[int, int]] | None
    num_pages: int | None
    page_size: int
    kv_cache_dtype: str
    kv_cache_dtype_skip_layers: Sequence[int | str] | None
    gpu_memory_utilization: float
    enable_prefix_caching: bool
    num_snapshots: int | None
    async_scheduling: bool
    scheduling_policy: str
    compile_ahead: bool
    exact: bool
    max_logprobs: int
    logprobs_mode: str
    tensor_parallel_size: int
    nnodes: int
    node_rank: int | None
    master_addr: str
    master_port: int
    distributed_timeout_seconds: int | None
    data_parallel_size: int
    enable_expert_parallel: bool
    kernels: str
    collectives: str
    device: str
    compilation_cache: str | Path | None
    seed: int
    verbose: bool


DEFAULTS: LLMOptions = {
    "params": None,
    "speculative_config": None,
    "dtype": "auto",
    "quantization": None,
    "max_model_len": None,
    "max_num_seqs": None,
    "max_num_batched_tokens": None,
    "max_num_scheduled_tokens": None,
    "decode_batches": None,
    "prefill_shapes": None,
    "num_pages": None,
    "page_size": 16,
    "kv_cache_dtype": "auto",
    "kv_cache_dtype_skip_layers": None,
    "gpu_memory_utilization": 0.9,
    "enable_prefix_caching": True,
    "num_snapshots": None,
    "async_scheduling": True,
    "scheduling_policy": "fcfs",
    "compile_ahead": False,
    "exact": False,
    "max_logprobs": 20,
    "logprobs_mode": "raw",
    "tensor_parallel_size": 1,
    "nnodes": 1,
    "node_rank": None,
    "master_addr": "127.0.0.1",
    "master_port": 29501,
    "distributed_timeout_seconds": None,
    "data_parallel_size": 1,
    "enable_expert_parallel": False,
    "kernels": "auto",
    "collectives": "auto",
    "device": "auto",
    "compilation_cache": "~/.cache/specjax",
    "seed": 0,
    "verbose": True,
}

REMOVED_OPTIONS = {
    "steps_per_dispatch": "it gained nothing on a GPU; async_scheduling=True, the default, hides "
    "the host's time",
    "show_progress": "verbose=False silences bars and log lines",
    "always_logprobs": "every step can report log-probabilities",
}


def read_options(
    given: Mapping[str, Any], defaults: Mapping[str, Any] = DEFAULTS
) -> dict[str, Any]:
    """Return all options: the `given` options, and for all other options the `defaults`.

    Raises:
        TypeError: an option is unknown; the message names the nearest known option.
        ValueError: an option of vLLM would change outputs, or an option was removed.
    """
    others = {name: value for name, value in given.items() if name not in defaults}
    _refuse_unknown(take_vllm_options(others), defaults)
    return {**defaults, **{name: given[name] for name in given if name in defaults}}


def _refuse_unknown(given: Mapping[str, Any], known: Iterable[str]) -> None:
    """Refuse unknown options.

    Raises:
        ValueError: an option was removed; the message names the alternative.
        TypeError: any other option is unknown; the message names the nearest known option.
    """
    for name, value in given.items():
        if name in REMOVED_OPTIONS:
            raise ValueError(f"{name}={value!r} was removed: {REMOVED_OPTIONS[name]}; leave it out")
        raise TypeError(f"unknown option {name!r}{did_you_mean(name, known)}")
