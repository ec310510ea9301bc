"""The sizes of packed inputs, which the host packs and the device unpacks."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

from specjax.config import EngineConfig
from specjax.device.packing import Packing

Inputs = TypeVar("Inputs")


@dataclass(frozen=True)
class Layout:
    """The sizes that determine how inputs are packed."""

    num_slots: int
    max_model_len: int
    pages_per_seq: int
    vocab_size: int
    num_tables: int = 1  # page tables per request: one, and one more per window
    num_snapshots: int = 0
    path_width: int = 0  # of `Suggestions`, in tokens; 0 without drafts from the host

    @classmethod
    def of(
        cls, config: EngineConfig, vocab_size: int, windows: Sequence[int], path_width: int = 0
    ) -> "Layout":
        """Return the layout of an engine's inputs. `windows` is the result of `page_windows`."""
        sizes = config.max_num_seqs, config.max_model_len, config.pages_per_seq
        return cls(*sizes, vocab_size, 1 + len(windows), config.num_snapshots, path_width)

    @property
    def table_width(self) -> int:
        """The number of entries in all page tables of one request."""
        return self.num_tables * self.pages_per_seq

    @property
    def mask_words(self) -> int:
        """The number of 32-bit words that hold one bit per token of the vocabulary."""
        return -(-self.vocab_size // 32)

    def packing(self, kind: type[Inputs]) -> Packing[Inputs]:
        """Return the `Packing` of `kind`, a class of inputs such as `PrefillInputs`."""
        if kind not in self._packings:
            self._packings[kind] = Packing(kind, self)
        return self._packings[kind]

    @cached_property
    def _packings(self) -> dict[type, Packing[Any]]:
        return {}
