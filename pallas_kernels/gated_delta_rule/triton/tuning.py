"""Tile sizes of the gated delta rule's kernels."""

from dataclasses import dataclass


@dataclass(frozen=True)
class DeltaRuleTuning:
    """Tile sizes, and how a state [D_v, D_k] is spread over the threads of a program."""

    # Lanes span the keys of one piece only; sums over keys add the pieces first, within each
    # thread, so that threads exchange less.
    piece: int = 32
    # Rows of a state per program, 32 registers of state a thread: many programs then share a
    # multiprocessor, some of which load while others compute.
    values: int = 32
    num_warps: int = 4
    fold_tokens: int = 2  # pending tokens that are loaded at a time
    inputs_tokens: int = 8  # new tokens per program of the inputs kernel, one after the other
    inputs_warps: int = 2
    chunk: int = 32  # tokens per chunk of a prompt
    prepare_piece: int = 16  # channels at a time in the prepare kernel
    prepare_warps: int = 4
    chunk_piece: int = 32  # channels at a time in the chunk kernel
    chunk_values: int = 16  # rows of a state per program in the chunk kernel
    chunk_warps: int = 4
    norm_heads: int = 8  # heads of a token per program of the norm kernel
    keep_channels: int = 1024  # ring channels per program of the keep kernel


def choose_tuning(batch: int) -> DeltaRuleTuning:
    """Return the tiles for so many requests: for few, smaller ones, so that all multiprocessors
    have some and each thread has less to do. Chosen by counts, not yet measured."""
    if batch < 8:
        return DeltaRuleTuning(values=16, fold_tokens=4, inputs_tokens=1, inputs_warps=4)
    return DeltaRuleTuning()


def has_one_owner(num_elements: int, num_warps: int) -> bool:
    """Return whether each element of a tile is in one thread, so that a kernel may update the tile
    in place: of fewer elements several threads have copies, and one of them might still read what
    another has written."""
    return num_elements >= 32 * num_warps
