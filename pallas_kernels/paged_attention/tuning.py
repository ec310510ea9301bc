"""Tile sizes of the paged attention kernels, by shape."""

from dataclasses import dataclass

import jax.numpy as jnp

NUM_SMS = 132  # of an H100 or H200


@dataclass(frozen=True)
class TuningConfig:
    """What a program of the attention kernel takes, and what it takes it with."""

    block_rows: int  # query rows, of the T G that share a key head
    block_tokens: int  # keys and values per turn of the loop
    num_splits: int  # programs that share the context of a block of rows
    num_warps: int
    num_stages: int  # blocks of keys and values in flight


def choose_config(
    batch: int, num_rows: int, num_heads: int, num_kv_heads: int, dim: int, context: int, dtype
) -> TuningConfig:
    return TuningConfig(16, 32, 2, 4, 2)
