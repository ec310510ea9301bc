"""Float8 weights with scales, as DeepSeek, Qwen and Mistral store them (`quant_method` fp8)."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np

from specjax.checkpoint.files import TensorFiles
from specjax.checkpoint.quantised.described import Described, is_named, of_config, tensor
from specjax.checkpoint.quantised.scaled import FLOAT8, Block, num_blocks, with_scales


@dataclass(frozen=True)
class FP8:
    """The `Format` of float8 weights.

    Activations keep their dtype, even if the config quantises them.
    """

    described: ClassVar[str] = "fp8 (e4m3)"
    block: Block | None  # rows and columns that share a scale; None without blocks
    skipped: tuple[str, ...] = ()  # patterns of modules that are not quantised

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> Self | None:
        """See `Format`."""
        if config.get("quant_method") != "fp8" or config.get("fmt", "e4m3") != "e4m3":
            return None
        block = one_block([config.get("weight_block_size")])
        skipped = of_config(config, "modules_to_not_convert", "ignored_layers")
        return None if block is False else cls(block, ("lm_head", *skipped))

    def join(self, files: TensorFiles, dtype: np.dtype) -> TensorFiles:
        """See `Format`."""
        return with_scales(files, self.block, dtype)

    def stored(
        self, name: str, shape: tuple[int, ...], dtype: np.dtype
    ) -> dict[str, Described] | None:
        """See `Format`."""
        if is_named(name, self.skipped):
            return None
        blocks = num_blocks(shape, self.block) if self.block else shape[:-2]
        return {name: tensor(FLOAT8, *shape), f"{name}_scale_inv": tensor(np.float32, *blocks)}


def one_block(sizes: Collection[Any]) -> Any:
    """Return the only block size (rows, columns) in `sizes`, ignoring falsy sizes.

    Return None if all sizes are falsy. Return False if there are several different sizes, or if the
    only size is not a pair of positive integers.
    """
    blocks = {tuple(size) if isinstance(size, list) else size for size in sizes if size}
    match [*blocks]:
        case []:
            return None
        case [(int(rows), int(columns))] if min(rows, columns) > 0:
            return rows, columns
    return False
