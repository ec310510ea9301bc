"""Tuning of the gated delta rule's kernels."""

from dataclasses import dataclass


@dataclass(frozen=True)
class DeltaRuleTuning:
    """Tuning of the gated delta rule's kernels: tile sizes, and warps per program."""

    # Columns per piece of a state [D_v, D_k]. The lanes of a warp span the columns of one piece.
    # Sums over columns first add the pieces within each thread, so that threads exchange less.
    piece: int = 32
    # Rows of a state per program. With 32 rows, a thread holds 32 registers of the state. Then many
    # programs share a multiprocessor, and some programs load while other programs compute.
    values: int = 32
    num_warps: int = 4
    fold_tokens: int = 2  # pending tokens loaded at a time
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
    """Return the tile sizes for `batch` requests.

    For a small batch, tiles are smaller. Then all multiprocessors have work, and each thread has
    less work. The sizes were calculated, and have not been measured yet.
    """
    if batch < 8:
        return DeltaRuleTuning(values=16, fold_tokens=4, inputs_tokens=1, inputs_warps=4)
    return DeltaRuleTuning()


def has_one_owner(num_elements: int, num_warps: int) -> bool:
    """Return whether each of the tile's `num_elements` elements is in only one thread.

    Only then can a kernel update the tile in place. If a tile has fewer elements than threads,
    several threads have copies of an element. Then a thread might read an element that another
    thread has already overwritten.
    """
    return num_elements >= 32 * num_warps
