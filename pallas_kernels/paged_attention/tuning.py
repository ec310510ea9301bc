"""Tile sizes of the paged attention kernels, by shape. Chosen by registers and shared memory."""

from dataclasses import dataclass

import jax.numpy as jnp

NUM_SMS = 132  # of an H100 or H200
MIN_BLOCKS = 3  # to a split: of fewer, the partial results weigh too much against what was read
MAX_SPLITS = 64  # the combine kernel holds a row's partials [splits, D] in registers


@dataclass(frozen=True)
class AttentionTuning:
    """What a program of the attention kernel takes, and what it takes it with."""

    block_rows: int  # query rows, of the T G that share a key head
    block_tokens: int  # keys and values per turn of the loop
    num_splits: int  # programs that share the context of a block of rows
    num_warps: int
    num_stages: int  # Triton's: a page's id and then its tokens take two each, so 5 is 2 blocks


# By bytes of an element of q, then D, then block_rows: block_tokens, num_warps, num_stages.
TILES = {
    2: {
        64: {
            16: (64, 4, 5),
            32: (64, 4, 5),
            64: (64, 4, 5),  # from 64 rows on, wgmma: one warpgroup for each 64
            128: (64, 8, 5),
        },
        128: {
            16: (64, 4, 5),  # 71 KiB: three programs to an SM, 64 KiB in flight each
            32: (64, 4, 5),
            64: (64, 4, 5),
            128: (64, 8, 3),  # 178 registers: one program to an SM; by now it computes, not waits
        },
        256: {  # an accumulator of D columns takes twice the registers: half the tokens
            16: (32, 4, 5),
            32: (32, 4, 5),  # 64 tokens would spill
            64: (32, 8, 3),  # two warpgroups share the D columns: one would spill
            128: (32, 8, 3),
        },
    },
    # No tensor core multiplies f32 exactly: every thread holds whole rows of D, so tiles are small
    # and warps many; 64 rows would spill. Multiplying takes longer than reading: one block in
    # flight is enough.
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
    """The tiles for T = `num_rows` new tokens of each request, over `context` tokens at most."""
    tiles = TILES[dtype.itemsize][dim]
    rows = num_rows * (num_heads // num_kv_heads)
    block_rows = min((size for size in tiles if size >= rows), default=max(tiles))
    block_tokens, num_warps, num_stages = tiles[block_rows]
    programs = batch * num_kv_heads * -(-rows // block_rows)
    # Two small programs run on an SM at once, and hide each other's softmax.
    room = NUM_SMS * (2 if block_rows <= 32 else 1)
    if 8 * programs >= 7 * NUM_SMS:
        num_splits = 1  # a second kernel would cost more than the idle eighth
    else:
        max_splits = min(-(-context // (MIN_BLOCKS * block_tokens)), MAX_SPLITS)
        num_splits = max(1, min(room // programs, max_splits))
    return AttentionTuning(block_rows, block_tokens, num_splits, num_warps, num_stages)
