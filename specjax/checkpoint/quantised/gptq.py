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
from specjax.checkpoint.quantised.packed import Unpacking, nibbles, unchanged
from specjax.checkpoint.quantised.qweight import with_qweights

# By version: what is added to stored zero points.
UNPACKINGS = {
    version: Unpacking(
        codes=lambda words: nibbles(words, 0).T,
        scales=unchanged,
        zeros=lambda words, added=added: (nibbles(words, 1, xp=np) + added) & 15,
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

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> Self | None:
        """See `Format`."""
        version, group = config.get("checkpoint_format") or "gptq", config.get("group_size")
        is_other = config.get("quant_method") != "gptq" or config.get("bits") != 4
        if is_other or version not in UNPACKINGS or not isinstance(group, int):
            return None
        return cls(version, group)

    def join(self, files: TensorFiles, dtype: np.dtype) -> TensorFiles:
        """See `Format`."""
        return with_qweights(files, UNPACKINGS[self.version], 0, self.group, dtype)
