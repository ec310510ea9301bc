"""Computes the memory that an engine needs, and how many pages fit into the rest."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.page_formats import PageFormat
from specjax.config import EngineConfig
from specjax.device.cache.kind import CacheSizes
from specjax.device.drafters.drafter import Drafter
from specjax.device.models.model import Model, init_caches, is_recurrent
from specjax.device.placement import default_device, local_shape
from specjax.device.weights.weight import ARRAYS, is_weight
from specjax.host.memory import available_bytes
from specjax.host.windows import pages_in_use, window_pages
from specjax.serving.defaults import device_defaults

SNAPSHOTS_PER_SEQ = 4  # so that conversations can continue or branch from their last turns


class CacheBytes(NamedTuple):
    """The bytes per page and per request slot that a cache takes on each device."""

    per_page: int  # keys and values of `page_size` tokens
    per_slot: int  # recurrent states of one request
    windows: tuple[tuple[int, int], ...] = ()  # pairs (window, bytes per page of its layers)

    def __add__(self, other: Any) -> "CacheBytes":  # by field
        return CacheBytes(*(one + another for one, another in zip(self, other, strict=True)))

    @property
    def per_full_page(self) -> int:
        """The bytes that one page takes in all layers without a window."""
        return self.per_page - sum(per_page for _, per_page in self.windows)

    def of_pages(self, config: EngineConfig, max_drafts: int) -> int:
        """Return the total bytes of the pages; each request has up to `max_drafts` draft tokens."""
        return config.num_pages * self.per_full_page + sum(
            window_pages(config, window, max_drafts) * per_page for window, per_page in self.windows
        )

    def fitted(self, config: EngineConfig, room: int, max_drafts: int) -> EngineConfig | None:
        """Return the config with pages for every request at full length, or as many pages as fit.

        Return None if a single request does not fit in `room` bytes. `config.num_pages` is ignored.
        A layer with a window gets as many pages as `window_pages` returns, but not more than would
        fit if all layers had the same number of pages.
        """
        wanted = config.max_num_seqs * config.pages_per_seq
        max_window_pages = None
        if self.windows:
            one = max(pages_in_use(config, w, max_drafts, 1) for w, _ in self.windows)
            max_window_pages = max(room // self.per_page, one)
        config = replace(config, num_pages=wanted, max_window_pages=max_window_pages)
        room -= self.of_pages(config, max_drafts) - wanted * self.per_full_page
        if room < config.pages_per_seq * self.per_full_page:
            return None
        if not self.per_full_page:  # all layers have windows
            return config
        return replace(config, num_pages=min(wanted, room // self.per_full_page))


def target_cache_bytes(
    target: Model,
    page_size: int,
    max_drafts: int,
    dtype: str,
    windows: Sequence[int] = (),
    page_format: PageFormat | None = None,
) -> CacheBytes:
    """Return the bytes per page and per request slot of a model's cache.

    `max_drafts` is the maximum number of draft tokens per request in a round. `windows` are the
    result of `page_windows`. `page_format` is the format of 8-bit pages; None for pages of `dtype`.
    """

    def measure(num_slots: int, num_pages: int, *own: tuple[int, int]) -> int:
        sizes = CacheSizes(
            num_slots,
            num_pages,
            page_size,
            max_drafts + 1,
            window_pages=own,
            page_format=page_format,
        )
        return _total(lambda: init_caches(target.local, sizes, np.dtype(dtype)))

    cache, nothing = _per_page_and_slot(measure), measure(0, 0)
    return cache._replace(windows=tuple((w, measure(0, 0, (w, 1)) - nothing) for w in windows))


def drafter_cache_bytes(
    drafter: Drafter,
    page_size: int,
    max_drafts: int,
    dtype: str,
    page_format: PageFormat | None = None,
) -> CacheBytes:
    """Return the bytes per page and per request slot of a drafter's state, without snapshots.

    The arguments are as for `target_cache_bytes`.
    """

    def measure(num_slots: int, num_pages: int) -> int:
        sizes = CacheSizes(num_slots, num_pages, page_size, max_drafts + 1, page_format=page_format)
        return _total(lambda: drafter.local.init_state(sizes, np.dtype(dtype)))

    return _per_page_and_slot(measure)


def weight_bytes(specs: Any, dtype: str) -> int:
    """Return the bytes that the parameters of a tree of `TensorSpec` take on each device.

    `dtype` is the dtype of parameters whose specs have no dtype.
    """
    return sum(
        math.prod(spec.local_shape) * np.dtype(spec.dtype or dtype).itemsize
        for spec in jax.tree.leaves(specs)
    )


def parameter_bytes(params: Any, dtype: str) -> int:
    """Return the bytes that arrays, or their shapes, take on each device if loaded in `dtype`.

    Arrays of quantised weights keep their dtypes, as do integers.
    """
    total = 0
    for x in jax.tree.leaves(params, is_leaf=is_weight):
        for path, array in jax.tree_util.tree_leaves_with_path(x):
            is_float = jnp.issubdtype(array.dtype, jnp.floating) and array.dtype.itemsize > 1
            stays = not is_float or any(getattr(key, "name", "") in ARRAYS[1:] for key in path)
            size = np.dtype(array.dtype if stays else dtype).itemsize
            total += math.prod(local_shape(array).shape) * size
    return total


class EngineNeeds(NamedTuple):
    """The memory that an engine needs on each device in addition to its pages, in bytes."""

    weights: int  # weights that are not loaded yet
    states: int
    snapshots: int
    workspace: int  # an estimate

    @classmethod
    def of(
        cls,
        config: EngineConfig,
        target: Model,
        drafter: Drafter,
        cache: CacheBytes,
        weights: int,
        max_drafts: int,
    ) -> "EngineNeeds":
        """Return the needs of an engine. `cache` includes the drafter's cache."""
        # A snapshot is a state and a part of the ring, so it takes at most the bytes of a slot.
        takes_snapshots = is_recurrent(target) or drafter.is_recurrent
        num_snapshots = config.num_snapshots if takes_snapshots else 0
        rows = config.max_num_seqs * (max_drafts + 1)
        # The largest step holds logits, their sorted copy and noise in f32, and the activations of
        # a layer. These are a few times the model's width per token, and the rows of attention.
        logits = 3 * 4 * rows * target.local.vocabulary.num_columns(target.vocab_size)
        tokens = max(rows, config.max_num_batched_tokens)
        row_size = 16 * target.hidden_size + max(kind.row_size for kind in target.local.cache_kinds)
        activations = tokens * row_size * np.dtype(config.dtype).itemsize
        return cls(
            weights,
            config.max_num_seqs * cache.per_slot,
            num_snapshots * cache.per_slot,
            logits + activations,
        )

    def _listed(self) -> str:
        named = self._asdict() | {"recurrent states": self.states}
        order = "weights", "recurrent states", "snapshots", "workspace"
        return ", ".join(f"{name} {_gib(named[name])}" for name in order if named[name])

    def check(self, config: EngineConfig, cache: CacheBytes, max_drafts: int) -> None:
        """Refuse pages that do not fit in the free memory, before any page is allocated.

        Raises:
            ValueError: the pages do not fit. The message lists the needs and what to lower.
        """
        memory = read_memory()
        pages = cache.of_pages(config, max_drafts)
        if memory is None or sum(self) + pages <= memory.available:
            return
        max_pages = (memory.available - sum(self)) // max(cache.per_page, 1)
        if max_pages >= config.pages_per_seq:
            remedy = f"lower num_pages to at most {max_pages}, or leave it out"
        elif self.weights > memory.available // 2:
            remedy = "use a device with more memory, dtype='bfloat16', or a smaller model"
        else:
            remedy = (
                "lower max_num_seqs, num_snapshots and max_num_batched_tokens, or max_model_len"
            )
        raise ValueError(
            f"num_pages={config.num_pages} do not fit, as pages take {_gib(pages)}, "
            f"{self._listed()}, which is {_gib(sum(self) + pages)}, and {memory.what} has "
            f"{_gib(memory.available)} left; {remedy}"
        )

    def _room(self, memory: "Memory", gpu_memory_utilization: float) -> int:
        """Return the bytes that are left for pages after all other needs."""
        room = memory.available - sum(self)
        if memory.total is None:
            return room
        in_use = memory.total - memory.available  # other programs may use a part of the total
        kept = gpu_memory_utilization * memory.total - in_use - sum(self) + self.workspace
        return min(room, int(kept))

    def usual_snapshots(
        self,
        config: EngineConfig,
        cache: CacheBytes,
        gpu_memory_utilization: float,
        max_drafts: int,
    ) -> int:
        """Return the default of num_snapshots.

        The default is four snapshots per request. This number is halved until the snapshots take at
        most an eighth of the memory that the pages of `config` leave free. The default is never
        below `config.num_snapshots`.
        """
        memory = read_memory()
        count = SNAPSHOTS_PER_SEQ * config.max_num_seqs
        if memory is None:
            return count
        room = self._room(memory, gpu_memory_utilization) - cache.of_pages(config, max_drafts)
        # Halve the number, because programs depend on it, and free memory differs between runs.
        while count > config.num_snapshots and count * cache.per_slot > room // 8:
            count //= 2
        return max(count, config.num_snapshots)

    def fitted(
        self,
        config: EngineConfig,
        cache: CacheBytes,
        gpu_memory_utilization: float,
        max_drafts: int,
    ) -> EngineConfig:
        """Return the config with pages for every request at full length, or as many pages as fit.

        Raises:
            ValueError: there is no room for one request of full length.
        """
        memory = read_memory()
        if memory is None:
            return replace(config, num_pages=config.max_num_seqs * config.pages_per_seq)
        room = self._room(memory, gpu_memory_utilization)
        fitted = cache.fitted(config, room, max_drafts)
        if fitted is None:
            one = config.pages_per_seq * cache.per_full_page + sum(
                pages_in_use(config, window, max_drafts, 1) * per_page
                for window, per_page in cache.windows
            )
            raise ValueError(
                f"max_model_len={config.max_model_len} does not fit, as a request takes "
                f"{_gib(one)} of pages, {self._listed()}, and {memory.what} has "
                f"{_gib(memory.available)} left"
                + (
                    f" (gpu_memory_utilization={gpu_memory_utilization} of {_gib(memory.total)})"
                    if memory.total is not None
                    else ""
                )
                + "; lower max_model_len, max_num_seqs or max_num_batched_tokens, or use "
                "dtype='bfloat16' or a device with more memory"
            )
        return fitted


def usual_num_seqs(target: Model, max_drafts: int, dtype: str, weights: int) -> int:
    """Return the default of max_num_seqs: the device's default, or less for large recurrent states.

    The device's default is halved until the recurrent states and their snapshots take at most half
    of the free memory that remains after loading `weights` bytes. Snapshots are assumed to take a
    quarter of the size of the states. If the free memory is unknown, the device's default is
    returned.
    """
    count, memory = device_defaults().max_num_seqs, read_memory()
    per_slot = target_cache_bytes(target, 1, max_drafts, dtype).per_slot
    if memory is None:
        return count
    room = (memory.available - weights) // 2
    while count > 1 and count * per_slot * 5 // 4 > room:
        count //= 2
    return count


class Memory(NamedTuple):
    """The memory of the device that engines run on, in bytes."""

    what: str  # the device's name in errors
    available: int
    total: int | None  # JAX's share of a GPU's memory; None if the host shares the memory


def read_memory() -> Memory | None:
    """Return the device's memory (for a CPU the machine's memory), or None if it is unknown."""
    device = default_device()
    stats = device.memory_stats() or {}
    if (total := stats.get("bytes_limit")) is not None:
        return Memory("the device", total - stats.get("bytes_in_use", 0), total)
    available = available_bytes() if device.platform == "cpu" else None
    return None if available is None else Memory("the machine", available, None)


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:,.1f} GiB"


def _per_page_and_slot(measure: Callable[[int, int], int]) -> CacheBytes:
    nothing = measure(0, 0)
    return CacheBytes(measure(0, 1) - nothing, measure(1, 0) - nothing)


def _total(make: Any) -> int:
    shapes = jax.tree.leaves(jax.eval_shape(make))
    return sum(math.prod(shape.shape) * shape.dtype.itemsize for shape in shapes)
