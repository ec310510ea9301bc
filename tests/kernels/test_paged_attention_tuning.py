"""The tiles that paged attention chooses."""

import json
from pathlib import Path

import jax.numpy as jnp
import pytest

from pallas_kernels.paged_attention.tuning import MIN_BLOCKS, NUM_SMS, choose_config

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "gpu.jsonl"
HEADS = {"Llama-8B": (32, 8, 128), "Qwen-27B": (24, 4, 256)}


@pytest.mark.parametrize("model", HEADS)
def test_no_tiles_were_faster_for_a_full_batch(model):
    """Of those that were measured on a GPU."""
    lines = map(json.loads, RESULTS.read_text().splitlines())
    times = {
        line["config"].partition("(")[2]: line["device_us"]
        for line in lines
        if line.get("what") == "paged_attention tiles" and line.get("device_us")
        if (line["model"], line["batch"], line["rows"], line["context"]) == (model, 64, 4, 4096)
    }
    chosen = choose_config(64, 4, *HEADS[model], 4096, jnp.dtype("bfloat16"))
    assert len(times) > 3
    assert times[str(chosen).partition("(")[2]] == min(times.values())


@pytest.mark.parametrize("num_kv_heads, dim", [(8, 128), (4, 256), (1, 64)])
@pytest.mark.parametrize("context", [64, 2048, 131_072])
def test_programs_fill_the_device_where_the_context_has_the_blocks(num_kv_heads, dim, context):
    for batch in 1, 2, 7, 16, 24, 64, 256:
        for num_rows in 1, 4, 16, 512:
            num_heads = num_kv_heads * 4
            config = choose_config(
                batch, num_rows, num_heads, num_kv_heads, dim, context, jnp.dtype("bfloat16")
            )
            blocks = -(-4 * num_rows // config.block_rows)
            programs = batch * num_kv_heads * blocks * config.num_splits
            assert 1 <= config.num_splits <= 64
            # A last wave of few programs, or too short a context, is all that leaves SMs idle.
            most = max(1, min(64, context // config.block_tokens // MIN_BLOCKS))
            assert programs >= NUM_SMS // 2 or config.num_splits >= most
            assert programs <= 2 * NUM_SMS or config.num_splits == 1
