"""Runs `specjax info`: describes a checkpoint or config, and the memory needed to serve it."""

import argparse
import json
import math
from bisect import bisect_right
from collections import Counter
from dataclasses import asdict, dataclass, is_dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.bench.environment import describe_environment
from specjax.checkpoint.files import open_checkpoint
from specjax.commands.compile_arguments import NAMES as COMPILED_NAMES
from specjax.commands.info_text import answer, as_lines
from specjax.commands.speculation import read_speculation
from specjax.config import DTYPES, EngineConfig, SpeculativeConfig, check_positive
from specjax.device.cache.kind import CacheSizes
from specjax.device.drafters.drafter import Drafter, NoDrafter
from specjax.device.models.model import Model, is_recurrent, page_windows
from specjax.device.placement import default_device
from specjax.device.weights.stored import dequantise
from specjax.host.windows import window_pages
from specjax.inspect.gpus import GPU, GPUS
from specjax.serving.assembly import Plan, make_plan
from specjax.serving.defaults import DEFAULTS, DtypeChoice
from specjax.serving.drafters import with_method
from specjax.serving.memory import CacheBytes, EngineNeeds, parameter_bytes, weight_bytes
from specjax.serving.source import ModelSource, open_model
from specjax.text.tokenizer import load_tokenizer

GPU_CONTEXTS = (4096, 32768)
GPU_MEMORY_UTILIZATION = 0.9  # the rest is for activations, logits and compiled programs


def run(args: argparse.Namespace) -> int:
    """Run `specjax info` without --compile."""
    for name in COMPILED_NAMES:
        if getattr(args, name):
            raise ValueError(f"--{name.replace('_', '-')} goes with --compile, which is missing")
    if args.data is not None:
        raise ValueError("--data goes with --check, which is missing")
    model = read_model(args)
    speculation = read_speculation(args, model, takes_shapes=True)
    report = describe(
        model,
        speculation=None if speculation is None else with_method(speculation, model),
        dtype=args.dtype,
        max_model_len=args.max_model_len,
        max_num_seqs=args.max_num_seqs,
        page_size=args.page_size,
        kv_cache_dtype=args.kv_cache_dtype,
        quantization=args.quantization,
        num_devices=1 if args.devices is None else args.devices,
    )
    report = {"answer": answer(report)} | report | {"environment": describe_environment()}
    print(json.dumps(report, indent=2) if args.json else "\n".join(as_lines(report)))
    return 0


def sizes_of(num_requests: int, num_tokens: int, page_size: int, **others: Any) -> EngineConfig:
    """Return the config of a GPU engine with pages for `num_requests` requests.

    Each request has `num_tokens` tokens. `others` are further fields of the config.
    """
    usual: dict[str, Any] = {"max_num_batched_tokens": DEFAULTS["gpu"].max_num_batched_tokens}
    return EngineConfig(
        max_model_len=num_tokens,
        max_num_seqs=num_requests,
        page_size=page_size,
        num_pages=num_requests * -(-num_tokens // page_size),
        **(usual | others),
    )


def read_model(args: argparse.Namespace) -> str:
    """Return the model that was given as MODEL or with --model."""
    if args.positional_model is not None and args.model is not None:
        raise ValueError(
            f"the model is given twice, as MODEL {args.positional_model} and as --model "
            f"{args.model}; leave one out"
        )
    model = args.model if args.positional_model is None else args.positional_model
    if model is None:
        raise ValueError("no model is given; pass one as MODEL or with --model")
    return model


def describe(
    model: str | Path,
    *,
    speculation: SpeculativeConfig | None = None,
    dtype: str = "auto",
    max_model_len: int | None = None,
    max_num_seqs: int | None = None,
    page_size: int = 16,
    kv_cache_dtype: str = "auto",
    quantization: str | None = None,
    num_devices: int = 1,
) -> dict[str, Any]:
    """Return the report as JSON-compatible types, by section.

    A section that does not apply is None.

    Args:
        model: a checkpoint (its folder, hub id or demo name), or a config file, or a folder with a
            config file.
        dtype: the dtype of weights and caches. The sections "h100" and "h200" always use bfloat16.
        kv_cache_dtype: the dtype of cache pages, as for `LLM`, in all sections.
        quantization: the number format to which unquantised weights are rounded.
        max_model_len, max_num_seqs: None for the device's defaults, as for `LLM`.
        num_devices: the number of GPUs over which the model is divided in "h100" and "h200".

    Raises:
        ValueError: the sizes do not fit the model, or a file is of the wrong kind.
    """
    check_positive(devices=num_devices)
    plans = [
        make_plan(
            open_model(model, takes_configs=True, num_devices=count, quantization=quantization),
            speculative_config=speculation,
            dtype=dtype,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=None,
            page_size=page_size,
            kv_cache_dtype=kv_cache_dtype,
        )
        for count in dict.fromkeys((1, num_devices))
    ]
    source, config = plans[0].source, plans[0].config
    setup, each = Reported.of(plans[0]), Reported.of(plans[-1])
    return {
        "model": describe_target(source),
        "weights": describe_weights(source),
        "drafter": plans[0].speculation and describe_drafter(plans[0].speculation, setup),
        "cache": describe_cache(setup, config.dtype),
        "defaults": describe_defaults(plans[0].dtype, config),
        "requests": describe_requests(setup, config),
        **{name: describe_gpu(setup, each, config, GPU.named(name)) for name in GPUS},
        "this_device": describe_device(setup, config),
    }


@dataclass(frozen=True)
class Needs:
    """The memory that weights and requests need, in bytes."""

    weights: int
    cache: CacheBytes
    page_size: int
    num_drafts: int

    def request(self, num_tokens: int) -> int:
        """Return the bytes that one request of `num_tokens` tokens needs while it decodes."""
        others = {"max_num_batched_tokens": 1, "enable_prefix_caching": False}
        sizes = sizes_of(1, num_tokens, self.page_size, **others)
        return self.cache.per_slot + self.cache.of_pages(sizes, self.num_drafts)

    def total(self, num_requests: int, num_tokens: int) -> int:
        """Return the bytes of the weights and of `num_requests` requests.

        Each request has `num_tokens` tokens.
        """
        return self.weights + num_requests * self.request(num_tokens)

    def longest_context(self, longest: int, num_bytes: int) -> int:
        """Return the number of tokens of the longest request that fits next to the weights.

        The weights and the request together take at most `num_bytes`. The result is at most
        `longest`.
        """
        pages = range(1, -(-longest // self.page_size) + 1)
        num = bisect_right(pages, num_bytes, key=lambda n: self.total(1, n * self.page_size))
        return min(longest, num * self.page_size)

    def largest_batch(self, num_tokens: int, num_bytes: int) -> int:
        """Return how many requests of `num_tokens` tokens fit in `num_bytes` with the weights."""
        return max(0, (num_bytes - self.weights) // self.request(num_tokens))


@dataclass(frozen=True)
class Reported:
    """A target and its drafter, and the sizes from which the report is computed."""

    plan: Plan
    specs: Any  # of the target's parameters
    target: Model
    drafter: Drafter
    drafter_params: Any  # arrays or their shapes
    num_drafts: int
    page_size: int
    windows: tuple[int, ...]  # sizes, in tokens, of windows with separate pages

    @classmethod
    def of(cls, plan: Plan) -> "Reported":
        """Return the target and the drafter of a plan."""
        target, page_size = plan.source.target, plan.config.page_size
        windows = page_windows(target, plan.config)
        models = plan.source.specs, target, plan.drafter, plan.drafter_params
        return cls(plan, *models, plan.num_drafts, page_size, windows)

    def slot(self, dtype: str) -> dict[str, int] | None:
        """Return the bytes per request of a recurrent target's caches, by name.

        "state" is the recurrent states. The other caches are buffers of values that are computed
        from recent tokens. Return None if the target is not recurrent.
        """
        sizes = CacheSizes(1, 0, self.page_size, self.num_drafts + 1)
        total: Counter[str] = Counter()
        for kind in self.target.local.cache_kinds:
            if kind.is_recurrent:
                cache = jax.eval_shape(partial(kind.init, sizes, np.dtype(dtype)))
                parts = cache._asdict().items()
                total.update({name: part.size * part.dtype.itemsize for name, part in parts})
        return dict(total) if any(total.values()) else None

    def drafter_weights(self, dtype: str) -> int:
        """Return the bytes of the drafter's parameters in `dtype`, on each device.

        If the drafter has a quantised copy of an output head, the copy is included.
        """
        return self.plan.head_bytes + parameter_bytes(self.drafter_params, dtype)

    def needs(self, dtype: str) -> Needs:
        """Return the memory that weights and requests need.

        If the target is recurrent, this includes one recurrent state per request.
        """
        own, drafter = self.plan.cache_bytes(dtype)
        weights = weight_bytes(self.specs, dtype) + self.drafter_weights(dtype)
        return Needs(weights, own + drafter, self.page_size, self.num_drafts)

    def needs_with_snapshots(self, dtype: str) -> Needs | None:
        """Return the memory for weights and requests if a request had K + 1 recurrent states.

        This is for comparison with engines that keep the state after each of the K + 1 tokens of a
        round with K drafts. Return None if the target is not recurrent.
        """
        needs, slot = self.needs(dtype), self.slot(dtype)
        if slot is None:
            return None
        per_slot = needs.cache.per_slot - sum(slot.values()) + (self.num_drafts + 1) * slot["state"]
        return replace(needs, cache=needs.cache._replace(per_slot=per_slot))


def describe_target(source: ModelSource) -> dict[str, Any]:
    """Describe the target, from its config and its folder."""
    tokenizer = None if source.folder is None else load_tokenizer(source.folder)
    target, hf = source.target, source.hf
    fields = asdict(target) if is_dataclass(target) else {}
    # A value without fields, like an activation, is shown by its class name.
    names = {
        name: type(getattr(target, name)).__name__ for name, made in fields.items() if made == {}
    }
    return {
        "config": source.origin,
        "model_type": hf and hf.get("model_type", None),
        "num_layers": target.num_layers,
        "is_recurrent": is_recurrent(target),
        **{name: _plain(value) for name, value in (fields | names).items()},
        "has_tokenizer": tokenizer is not None,
        "has_chat_template": tokenizer is not None and tokenizer.has_templates,
    }


def describe_weights(source: ModelSource) -> dict[str, Any]:
    """Return the number of parameters, and their bytes as stored and as loaded in each dtype."""
    target, stored = source.target, Counter[str]()
    if source.folder is not None and source.has_weights:
        for tensor in open_checkpoint(source.folder).tensors.values():
            stored[str(tensor.dtype)] += math.prod(tensor.shape) * tensor.dtype.itemsize
    return {
        "are_here": source.has_weights,
        "num_parameters": sum(math.prod(spec.shape) for spec in jax.tree.leaves(target.specs())),
        "stored_bytes": dict(stored) if source.has_weights else None,
        "loaded_bytes": {dtype: weight_bytes(source.specs, dtype) for dtype in DTYPES},
    }


def describe_drafter(config: SpeculativeConfig, setup: Reported) -> dict[str, Any]:
    """Describe the drafter, with the bytes of its weights in each dtype."""
    plain = jax.eval_shape(partial(dequantise, dtype=jnp.float32), setup.drafter_params)
    return {
        "checkpoint": "the target's own" if config.model is None else str(config.model),
        "method": config.method,
        "num_speculative_tokens": config.num_speculative_tokens,
        "num_parameters": sum(x.size for x in jax.tree.leaves(plain) if _is_float(x)),
        "loaded_bytes": {dtype: setup.drafter_weights(dtype) for dtype in DTYPES},
        "aux_layers": list(setup.drafter.aux_layers),
    }


def describe_cache(setup: Reported, dtype: str) -> dict[str, Any]:
    """Return the bytes of the cache per token and per request.

    For comparison, "snapshot_bytes" are the bytes of K + 1 recurrent states per request.
    """
    (own, drafter), has_drafter = setup.plan.cache_bytes(dtype), setup.drafter != NoDrafter()
    kv = [cache.per_page // setup.page_size for cache in (own, drafter)]
    slot, num_states = setup.slot(dtype), setup.num_drafts + 1
    stored = setup.plan.config.page_format
    return {
        "dtype": stored.dtype if stored else dtype,
        "kv_bytes_per_token": {
            "target": kv[0],
            "drafter": kv[1] if has_drafter else None,
            "all": sum(kv),
        },
        "window_bytes_per_token": {
            f"{window} tokens": per_page // setup.page_size for window, per_page in own.windows
        }
        or None,
        "slot_bytes": slot and {**slot, "all": sum(slot.values())},
        "slot_over_state": slot and sum(slot.values()) / slot["state"],
        "num_snapshots": slot and num_states,
        "snapshot_bytes": slot and num_states * slot["state"],
        "snapshots_over_state": slot and float(num_states),
        "drafter_slot_bytes": drafter.per_slot if has_drafter else None,
    }


def describe_defaults(dtype: DtypeChoice, config: EngineConfig) -> dict[str, Any]:
    """Return the values to which this device resolves "auto" and None, with the reasons."""
    return {
        "dtype": dtype.name,
        "dtype_reason": dtype.reason,
        "max_num_seqs": config.max_num_seqs,
        "max_num_batched_tokens": config.max_num_batched_tokens,
        "max_model_len": config.max_model_len,
        "reason": f"defaults of a {default_device().platform}",
    }


def describe_requests(setup: Reported, config: EngineConfig) -> dict[str, Any]:
    """Return the bytes that `max_num_seqs` requests of `max_model_len` tokens need."""
    num_requests, num_tokens = config.max_num_seqs, config.max_model_len
    needs = setup.needs(config.dtype)
    snapshots = setup.needs_with_snapshots(config.dtype)
    return {
        "max_num_seqs": num_requests,
        "max_model_len": num_tokens,
        "page_size": config.page_size,
        "pages_per_request": config.pages_per_seq,
        "dtype": config.dtype,
        "weight_bytes": needs.weights,
        "page_bytes": num_requests * (needs.request(num_tokens) - needs.cache.per_slot),
        "slot_bytes": num_requests * needs.cache.per_slot,
        "total_bytes": needs.total(num_requests, num_tokens),
        "total_bytes_with_snapshots": snapshots and snapshots.total(num_requests, num_tokens),
    }


def describe_gpu(setup: Reported, each: Reported, config: EngineConfig, gpu: GPU) -> dict[str, Any]:
    """Return the largest requests and batches that fit on a GPU, with weights in bfloat16.

    `setup` describes the models on one device. If they are divided over several GPUs, `each`
    describes one GPU's part of them.
    """
    whole, needs = setup.needs("bfloat16"), each.needs("bfloat16")
    snapshots = each.needs_with_snapshots("bfloat16")
    num_devices = each.target.num_devices
    usable, longest = int(GPU_MEMORY_UTILIZATION * gpu.memory_bytes), setup.target.max_position
    contexts = [n for n in GPU_CONTEXTS if n <= longest] or [longest]

    def largest(needs: Needs) -> dict[str, int]:
        return {f"{n} tokens": needs.largest_batch(n, usable) for n in contexts}

    num_needed = -(-whole.weights // usable)
    sizes = sizes_of(DEFAULTS["gpu"].max_num_seqs, longest, setup.page_size)
    room = usable - needs.weights - sizes.max_num_seqs * needs.cache.per_slot
    fitted = needs.cache.fitted(sizes, room, setup.num_drafts)
    return {
        "dtype": "bfloat16",
        "memory_bytes": gpu.memory_bytes,
        "usable_bytes": usable,
        "weight_bytes": whole.weights,
        **(_per_device(needs, config, num_devices) if num_devices > 1 else {}),
        "longest_context": needs.longest_context(longest, usable),
        "largest_batch": largest(needs),
        "largest_batch_with_snapshots": snapshots and largest(snapshots),
        "context_tokens": {
            f"{sizes.max_num_seqs} requests": fitted.num_pages * setup.page_size if fitted else 0
        },
        "reason": f"the weights alone do not fit; {num_needed} such devices would hold them"
        if needs.weights > usable
        else None,
    }


def _per_device(needs: Needs, config: EngineConfig, num_devices: int) -> dict[str, Any]:
    sizes = config.max_num_seqs, config.max_model_len
    return {
        "num_devices": num_devices,
        "weight_bytes_per_device": needs.weights,
        "request_bytes_per_device": sizes[0] * needs.request(sizes[1]),
    }


def describe_device(setup: Reported, config: EngineConfig) -> dict[str, Any]:
    """Return the page pool that an engine with `config` would have on this device."""
    needs, num_drafts = setup.needs(config.dtype), setup.num_drafts
    num_pages, pool_bytes, windows, reason = 0, 0, {}, None
    try:
        models = setup.target, setup.drafter
        whole = EngineNeeds.of(config, *models, needs.cache, needs.weights, num_drafts)
        config = whole.fitted(config, needs.cache, GPU_MEMORY_UTILIZATION, num_drafts)
        num_pages, pool_bytes = config.num_pages, needs.cache.of_pages(config, num_drafts)
        windows = {f"{w} tokens": window_pages(config, w, num_drafts) for w in setup.windows}
    except ValueError as error:  # the report says what does not fit
        reason = str(error)
    return {
        "kind": default_device().device_kind,
        "num_pages": num_pages,
        "window_pages": windows or None,
        "pool_bytes": pool_bytes,
        "max_full_length_requests": min(config.max_num_seqs, num_pages // config.pages_per_seq),
        "reason": reason,
    }


def _is_float(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating)


def _plain(value: Any) -> Any:
    """Convert a field of a model to plain types. A tuple of names becomes a count of each name."""
    if hasattr(value, "_asdict"):
        return value._asdict()
    if isinstance(value, tuple) and value and all(isinstance(one, str) for one in value):
        return dict(Counter(value))
    return value
