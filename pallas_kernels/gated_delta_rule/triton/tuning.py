"""Tile sizes of the gated delta rule's kernels."""

from dataclasses import dataclass


@dataclass(frozen=True)
class DeltaRuleTuning:
    """How a program's state [D_v, D_k] lies across its threads."""

    # Keys are taken apart into pieces so wide, and sums over them run over the pieces first, each
    # thread on its own: lanes lie across the keys of one piece only, and exchange that much less.
    piece: int = 32
    # Rows of a state that are a program's own: so few that two programs run on a multiprocessor,
    # one of which computes while the other loads.
    values: int = 64
    num_warps: int = 8
    chunk: int = 32  # tokens of a prompt that are taken at a time
    prepare_piece: int = 16  # and channels, where a program prepares them
    prepare_warps: int = 4
    chunk_piece: int = 32  # and where it folds them into its state
    chunk_values: int = 16  # rows of which are its own
    chunk_warps: int = 4
    norm_heads: int = 8  # of a token, for a program that norms them
    keep_channels: int = 1024  # of the ring, for a program that writes what a prompt leaves there
