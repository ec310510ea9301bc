"""The sizes of packed inputs, shared by the host, which packs, and the device, which unpacks."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

from specjax.config import EngineConfig
from specjax.device.packing import Packing

Inputs = TypeVar("Inputs")


@dataclass(frozen=True)
class Layout:
    """The sizes that packed rows depend on."""

    num_slots: int
    max_model_len: int
    pages_per_seq: int
    vocab_size: int
    num_tables: int = 1  # page tables of a request: one, and one more per window
    num_snapshots: int = 0

    @classmethod
    def of(cls, config: EngineConfig, vocab_size: int, windows: Sequence[int]) -> "Layout":
        """Return the layout of an engine; `windows` are the result of `page_windows`."""
        sizes = config.max_num_seqs, config.max_model_len, config.pages_per_seq
        return cls(*sizes, vocab_size, 1 + len(windows), config.num_snapshots)

    @property
    def table_width(self) -> int:
        """Number of entries of all page tables of a request."""
        return self.num_tables * self.pages_per_seq

    @property
    def mask_words(self) -> int:
        """Number of 32-bit words that hold one bit per token."""
        return -(-self.vocab_size // 32)

    def packing(self, kind: type[Inputs]) -> Packing[Inputs]:
        """Return the packing of a class of inputs."""
        if kind not in self._packings:
            self._packings[kind] = Packing(kind, self)
        return self._packings[kind]

    @cached_property
    def _packings(self) -> dict[type, Packing[Any]]:
        return {}
