"""Weights of GPTQ (AutoGPTQ, GPTQModel): 4-bit numbers, packed along the inputs.

The first version of the format ("gptq") stores zero points minus one; "gptq_v2" stores them as they
are. With `desc_act`, the inputs of a group are not adjacent, and the tensor X.g_idx holds the group
of each input.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np

from specjax.checkpoint.files import TensorFiles
from specjax.checkpoint.quantised.described import Described, is_named, tensor
from specjax.checkpoint.quantised.packed import Unpacking, nibbles, unchanged
from specjax.checkpoint.quantised.qweight import qweights, with_qweights

# By version: what is added to stored zero points.
UNPACKINGS = {
    version: Unpacking(
        codes=lambda words: nibbles(words, 0).T,
        scales=unchanged,
        zeros=lambda words, added=added: (nibbles(words, 1) + added) & 15,
        axes=((1, 1), (0, 8)),
    )
    for version, added in (("gptq", 1), ("gptq_v2", 0))
}


@dataclass(frozen=True)
class GPTQ:
    """See `Format`."""

    described: ClassVar[str] = "gptq (4 bits, checkpoint_format gptq or gptq_v2)"
    version: str
    group: int  # the usual number of inputs in a group; -1 for all inputs
    is_symmetric: bool = True
    is_ordered: bool = False  # whether a group's inputs need not be adjacent (`desc_act`)
    has_head: bool = False  # whether the output head is quantised

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> Self | None:
        """See `Format`."""
        version, group = config.get("checkpoint_format") or "gptq", config.get("group_size")
        is_other = config.get("quant_method") != "gptq" or config.get("bits") != 4
        if is_other or version not in UNPACKINGS or not isinstance(group, int):
            return None
        flags = config.get("sym", True), config.get("desc_act", False), config.get("lm_head", False)
        return cls(version, group, *map(bool, flags))

    def join(self, files: TensorFiles, dtype: np.dtype) -> TensorFiles:
        """See `Format`."""
        return with_qweights(files, UNPACKINGS[self.version], 0, self.group, dtype)

    def stored(
        self, name: str, shape: tuple[int, ...], dtype: np.dtype
    ) -> dict[str, Described] | None:
        """See `Format`."""
        made = (
            None
            if is_named(name, () if self.has_head else ("lm_head",))
            else (qweights(name, shape, self.group, axis=0))
        )
        if made is None:
            return None
        stem, num_in = name.removesuffix("weight"), shape[1]
        if self.is_symmetric:  # all zero points are 8
            zero = 0x88888888 if self.version == "gptq_v2" else 0x77777777
            words = np.full(made[f"{stem}qzeros"].shape, zero, np.uint32).view(np.int32)
            made[f"{stem}qzeros"] = tensor(np.int32, values=words)
        groups = np.arange(num_in) // (self.group if self.group > 0 else num_in)
        if self.is_ordered:
            groups[[0, -1]] = groups[[-1, 0]]
        return made | {f"{stem}g_idx": tensor(np.int32, values=groups)}
