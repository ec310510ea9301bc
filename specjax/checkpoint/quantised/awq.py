"""Weights of AWQ (AutoAWQ, version "gemm"): 4-bit numbers, packed along the outputs."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np

from specjax.checkpoint.files import TensorFiles
from specjax.checkpoint.quantised.described import Described, is_named, of_config
from specjax.checkpoint.quantised.packed import Unpacking, nibbles, unchanged
from specjax.checkpoint.quantised.qweight import qweights, with_qweights

_ORDER = 0, 4, 1, 5, 2, 6, 3, 7  # for each of eight adjacent outputs, its place in a word
UNPACKING = Unpacking(
    codes=lambda words: nibbles(words, 1, _ORDER).T,
    scales=unchanged,
    zeros=lambda words: nibbles(words, 1, _ORDER),
    axes=((1, 8), (0, 1)),
)


@dataclass(frozen=True)
class AWQ:
    """See `Format`."""

    described: ClassVar[str] = 'awq (4 bits with zero points, version "gemm")'
    group: int  # the usual number of inputs in a group; -1 for all inputs
    skipped: tuple[str, ...] = ()  # patterns of modules that are not quantised

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> Self | None:
        """See `Format`."""
        version = config.get("version") or config.get("format") or "gemm"
        group = config.get("group_size", config.get("q_group_size"))
        is_packed = config.get("bits", config.get("w_bit")) == 4 and config.get("zero_point", True)
        is_awq = config.get("quant_method") == "awq" and str(version).lower() == "gemm"
        skipped = "lm_head", *of_config(config, "modules_to_not_convert")
        return cls(group, skipped) if is_awq and is_packed and isinstance(group, int) else None

    def join(self, files: TensorFiles, dtype: np.dtype) -> TensorFiles:
        """See `Format`."""
        return with_qweights(files, UNPACKING, 1, self.group, dtype)

    def stored(
        self, name: str, shape: tuple[int, ...], dtype: np.dtype
    ) -> dict[str, Described] | None:
        """See `Format`."""
        is_plain = is_named(name, self.skipped)
        return None if is_plain else qweights(name, shape, self.group, axis=1)
