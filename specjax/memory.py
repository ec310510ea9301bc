"""What caches take of a device's memory, and how many pages that leaves room for."""

import math
from typing import Any, NamedTuple

import jax
import numpy as np

from specjax.config import EngineConfig
from specjax.device.drafters.drafter import Drafter
from specjax.device.models.model import Model


class CacheBytes(NamedTuple):
    """Sizes of a cache in bytes."""

    per_page: int  # keys and values of `page_size` tokens
    per_slot: int  # recurrent states, one request's

    def __add__(self, other: Any) -> "CacheBytes":  # of another cache, by field
        return CacheBytes(self.per_page + other.per_page, self.per_slot + other.per_slot)


def target_cache_bytes(target: Model, page_size: int, most_drafts: int, dtype: str) -> CacheBytes:
    """What a model's cache takes for steps of up to `most_drafts` drafts."""

    def measure(num_slots: int, num_pages: int) -> int:
        return _total(
            lambda: target.init_cache(
                num_slots, num_pages, page_size, most_drafts + 1, np.dtype(dtype)
            )
        )

    return _per_page_and_slot(measure)


def drafter_cache_bytes(drafter: Drafter, page_size: int, dtype: str) -> CacheBytes:
    """What a drafter's state takes."""

    def measure(num_slots: int, num_pages: int) -> int:
        return _total(lambda: drafter.init_state(num_slots, num_pages, page_size, np.dtype(dtype)))

    return _per_page_and_slot(measure)


def weight_bytes(target: Model, dtype: str) -> int:
    """What a model's parameters take in `dtype`."""
    specs = jax.tree.leaves(target.specs())
    return sum(math.prod(spec.shape) * np.dtype(spec.dtype or dtype).itemsize for spec in specs)


def default_num_pages(
    config: EngineConfig,
    cache: CacheBytes,
    weights: int,
    gpu_memory_utilization: float,
    *,
    is_recurrent: bool,
) -> int:
    """Pages for every request at full length, or as many as the device's memory holds.

    `weights` are bytes; the config's own num_pages does not count. A recurrent model has states
    beside those of its requests: snapshots of prefixes.

    Raises:
        ValueError: weights and recurrent states leave no room for a page.
    """
    wanted = config.max_num_seqs * config.pages_per_seq
    limit = (jax.devices()[0].memory_stats() or {}).get("bytes_limit")
    if limit is None:
        return wanted
    num_states = config.max_num_seqs + (config.num_snapshots if is_recurrent else 0)
    states = num_states * cache.per_slot
    room = gpu_memory_utilization * limit - weights - states
    if room < cache.per_page:
        raise ValueError(
            f"max_num_seqs={config.max_num_seqs}: weights of {weights / 2**30:.1f} GiB and states "
            f"of {states / 2**30:.1f} GiB leave no page in "
            f"gpu_memory_utilization={gpu_memory_utilization} of {limit / 2**30:.1f} GiB; lower "
            "max_num_seqs, or raise gpu_memory_utilization"
        )
    return min(wanted, int(room // cache.per_page))


def _per_page_and_slot(measure: Any) -> CacheBytes:
    nothing = measure(0, 0)
    return CacheBytes(measure(0, 1) - nothing, measure(1, 0) - nothing)


def _total(make: Any) -> int:
    shapes = jax.tree.leaves(jax.eval_shape(make))
    return sum(math.prod(shape.shape) * shape.dtype.itemsize for shape in shapes)
