"""Random weights that make every tensor change the outputs, and files that hold weights."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class TargetFiles:
    """A target's folder, and the transformers model that was saved there (float32, eval mode)."""

    folder: Path
    hf: Any


@dataclass(frozen=True)
class HeadFiles:
    """A drafter's folder, its tensors by published name, and its config."""

    folder: Path
    tensors: Mapping[str, Any]
    config: Mapping[str, Any]


def randomise(tensors: Mapping[str, Any], seed: int, plain_norms: str = "norm") -> None:
    """Fill torch tensors with random numbers, in place. Matrices keep the scale of their inputs.

    Norm weights are near one if their names contain `plain_norms`. Other norm weights are near
    zero.
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
    """Replace the tensors of a safetensors file by the result of `change`."""
    import safetensors.torch

    tensors = change(safetensors.torch.load_file(path))
    safetensors.torch.save_file(dict(tensors), path, metadata={"format": "pt"})
