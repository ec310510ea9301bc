"""Tile sizes of the paged attention kernels by shape, limited by registers and shared memory."""

from dataclasses import dataclass

import jax.numpy as jnp

NUM_SMS = 132  # multiprocessors of an H100 or H200
MIN_BLOCKS = 3  # per split; with fewer, partial results are too large compared to the keys read
MAX_SPLITS = 64  # the combine kernel keeps a row's partial results [splits, D] in registers


@dataclass(frozen=True)
class AttentionTuning:
    """Tile sizes and launch parameters of the attention kernel."""

    block_rows: int  # query rows per program, out of T G per key head
    block_tokens: int  # keys and values per iteration
    num_splits: int  # programs that divide the context of a block of rows
    num_warps: int
    num_stages: int  # of Triton's pipeline; 5 for 2 blocks (2 each for page ids and tokens)


# Bytes per element of q -> D -> block_rows: (block_tokens, num_warps, num_stages).
TILES = {
    2: {
        64: {
            16: (64, 4, 5),
            32: (64, 4, 5),
            64: (64, 4, 5),  # from 64 rows on, wgmma: one warpgroup per 64 rows
            128: (64, 8, 5),
        },
        128: {
            # 38 KiB and 118 registers: four programs per SM. 64 requests of 4,096 tokens took
            # 360 us on an H100, with 64 tokens 419 (366 in 7 stages).
            16: (32, 4, 5),
            32: (64, 4, 5),
            64: (64, 4, 5),
            128: (64, 8, 3),  # 178 registers: one program per SM; compute-bound
        },
        256: {  # the accumulator takes twice the registers, so half the tokens
            16: (32, 4, 5),
            32: (32, 4, 5),  # 64 tokens would spill
            64: (32, 8, 3),  # two warpgroups divide the D columns: one would spill
            128: (32, 8, 3),
        },
    },
    # Tensor cores do not multiply f32 exactly. Without them every thread holds whole rows of D, so
    # tiles are small with many warps; 64 rows would spill. Multiplying takes longer than reading,
    # so one block in flight is enough.
    4: {
        64: {16: (32, 8, 3), 32: (32, 8, 3)},
        128: {16: (16, 8, 3), 32: (16, 8, 3)},
        256: {16: (16, 8, 3), 32: (16, 8, 3)},
    },
}


def choose_config(
    batch: int,
    num_rows: int,
    num_heads: int,
    num_kv_heads: int,
    dim: int,
    context: int,
    dtype: jnp.dtype,
) -> AttentionTuning:
    """Return the tiling for `num_rows` rows per request that attend to up to `context` tokens."""
    tiles = TILES[dtype.itemsize][dim]
    rows = num_rows * (num_heads // num_kv_heads)
    block_rows = min((size for size in tiles if size >= rows), default=max(tiles))
    block_tokens, num_warps, num_stages = tiles[block_rows]
    programs = batch * num_kv_heads * -(-rows // block_rows)
    # Two small programs share an SM, and overlap their softmax with other work.
    room = NUM_SMS * (2 if block_rows <= 32 else 1)
    if 8 * programs >= 7 * NUM_SMS:
        num_splits = 1  # a second kernel costs more than leaving an eighth of the GPU idle
    else:
        max_splits = min(-(-context // (MIN_BLOCKS * block_tokens)), MAX_SPLITS)
        num_splits = max(1, min(room // programs, max_splits))
    return AttentionTuning(block_rows, block_tokens, num_splits, num_warps, num_stages)
