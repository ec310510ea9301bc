"""Random weights in which every tensor matters, in place of those of a file."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class TargetFiles:
    """A target's folder, and the transformers model that wrote it (fp32, in evaluation mode)."""

    folder: Path
    hf: Any


@dataclass(frozen=True)
class HeadFiles:
    """A drafter's folder, and what is in it: tensors by published name, and the config."""

    folder: Path
    tensors: Mapping[str, Any]
    config: Mapping[str, Any]


def randomise(tensors: Mapping[str, Any], seed: int, plain_norms: str = "norm") -> None:
    """Fill torch tensors in place: matrices keep the scale of what they multiply.

    Norms whose names hold `plain_norms` are near one, others near zero.
    """
    import torch

    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in tensors.items():
            noise = torch.randn(tensor.shape, generator=generator)
            if name.endswith("A_log"):  # decays slow enough for states that last
                tensor.copy_((noise.abs() + 0.05).log())
            elif name.endswith("dt_bias"):
                tensor.copy_(0.5 * noise - 2)
            elif tensor.ndim > 1:
                tensor.copy_(noise / math.sqrt(tensor.shape[-1]))
            else:
                tensor.copy_(0.3 * noise + (1.0 if plain_norms in name else 0.0))


def rewrite(path: Path, change: Callable[[dict[str, Any]], Mapping[str, Any]]) -> None:
    """Replace the tensors of a safetensors file by what `change` makes of them."""
    import safetensors.torch

    tensors = change(safetensors.torch.load_file(path))
    safetensors.torch.save_file(dict(tensors), path, metadata={"format": "pt"})
