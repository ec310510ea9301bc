"""The sizes of packed rows: shared by the host, which packs, and the device, which unpacks."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import numpy as np

from specjax.config import EngineConfig
from specjax.device.inputs import AdmitInputs, DecodeInputs, PrefillInputs
from specjax.device.requests import init_requests
from specjax.host.plans import DecodePlan, PrefillPlan


@dataclass(frozen=True)
class Layout:
    """The sizes that packed rows depend on."""

    num_slots: int
    max_model_len: int
    pages_per_seq: int
    vocab_size: int
    num_tables: int = 1  # page tables of a request: that of most layers, and one per window

    @classmethod
    def of(cls, config: EngineConfig, vocab_size: int, windows: Sequence[int]) -> "Layout":
        """Those of an engine; `windows` as of `page_windows`."""
        sizes = config.max_num_seqs, config.max_model_len, config.pages_per_seq
        return cls(*sizes, vocab_size, 1 + len(windows))

    @property
    def table_width(self) -> int:
        """Columns of a request's page tables, which come last in packed rows."""
        return self.num_tables * self.pages_per_seq

    @property
    def mask_words(self) -> int:
        """Words of 32 bits that hold a bit per token."""
        return -(-self.vocab_size // 32)

    @cached_property
    def no_admission(self) -> AdmitInputs:
        """A padding row, in NumPy: the fields of a row with their shapes [1, ...] and dtypes."""
        slots: Any = np.full(1, self.num_slots, np.int32)
        tokens: Any = np.full((1, self.max_model_len), -1, np.int32)
        return AdmitInputs(slots, init_requests(1, self.vocab_size, xp=np), tokens)

    def admit_shape(self, batch: int) -> tuple[int, int]:
        """Shape of the array that `pack_admissions` makes."""
        return batch, sum(leaf.size for leaf in jax.tree.leaves(self.no_admission))

    def prefill_shape(self, batch: int) -> tuple[int, int]:
        """Shape of the array that `pack` makes of a plan of chunks."""
        return batch, len(PrefillInputs._fields) - 1 + self.table_width

    def decode_shape(self, batch: int) -> tuple[int, int]:
        """Shape of the array that `pack` makes of a plan of a round."""
        return batch, len(DecodeInputs._fields) - 1 + self.table_width

    def mask_shape(self, plan: PrefillPlan | DecodePlan) -> tuple[int, int, int]:
        """Shape of a step's grammar masks."""
        num_rows = plan.k + 1 if isinstance(plan, DecodePlan) else 1
        return plan.batch, num_rows, self.mask_words
