"""Tile sizes of the gated delta rule's kernels."""

from dataclasses import dataclass


@dataclass(frozen=True)
class DeltaRuleTuning:
    """Tile sizes, and how a state [D_v, D_k] is spread over the threads of a program."""

    # Keys are split into pieces of this width. Sums over keys add the pieces first, within each
    # thread; lanes span the keys of one piece only, so they exchange less.
    piece: int = 32
    # Rows of a state per program: few enough that two programs run on a multiprocessor, one
    # computing while the other loads.
    values: int = 64
    num_warps: int = 8
    chunk: int = 32  # tokens per chunk of a prompt
    prepare_piece: int = 16  # channels at a time in the prepare kernel
    prepare_warps: int = 4
    chunk_piece: int = 32  # channels at a time in the chunk kernel
    chunk_values: int = 16  # rows of a state per program in the chunk kernel
    chunk_warps: int = 4
    norm_heads: int = 8  # heads of a token per program of the norm kernel
    keep_channels: int = 1024  # ring channels per program of the keep kernel
