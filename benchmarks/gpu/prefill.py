"""Measures prefill throughput, also relative to the card's matmul rate."""

import time
from collections.abc import Iterator
from typing import Any

from card import measure_product
from engines import Chosen, make_engine, make_models, make_requests, read_config
from timing import Setting, attempt, spread

from specjax.engine.engine import Engine

MODEL = "Llama-3.1-8B"
ROUNDS = 5


def measure_prefill(setting: Setting) -> Iterator[dict[str, Any]]:
    """Measure the prefill of 32 prompts of 1,900 tokens.

    A chunk has up to four prompts of up to 2,048 tokens.
    """
    batch, num_tokens, rows, width = setting.pick((32, 1900, 4, 2048), (2, 12, 2, 16))
    row = {"what": "prefill", "model": MODEL, "batch": batch, "tokens": num_tokens}

    def one() -> dict[str, Any]:
        models = make_models(MODEL, setting)
        engine = make_engine(
            models, batch, Chosen((0,)), (), setting, is_plain=True, room=num_tokens,
            max_num_batched_tokens=rows * width, prefill_shapes=((rows, width),),
        )  # fmt: skip
        run(engine, batch, num_tokens, setting)  # touches memory
        times = [run(engine, batch, num_tokens, setting) for _ in range(setting.pick(ROUNDS, 1))]
        ms = spread(times, 1e3)
        tflops = batch * flops(read_config(MODEL, setting), num_tokens) / ms["median"] / 1e9
        product = measure_product(setting.pick(8192, 64), setting)["tflops"]
        return {
            "ms": ms,
            "tokens_per_second": batch * num_tokens / ms["median"] * 1e3,
            "tflops": tflops,
            "of_product": tflops / product,
        }

    yield attempt(row, one)


def run(engine: Engine, batch: int, num_tokens: int, setting: Setting) -> float:
    """Return the seconds until every prompt has its first token."""
    vocab_size = engine.target.vocab_size
    requests = make_requests(batch, vocab_size, 1, setting, num_prompt=num_tokens)
    start = time.perf_counter()
    for request in requests:
        engine.add(request)
    while engine.has_work:
        engine.step()
    return time.perf_counter() - start


def flops(config: dict[str, Any], num_tokens: int) -> float:
    """Return the FLOPs of a prompt, for matmuls of layers and for causal attention.

    The output head is left out.
    """
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    dim = config.get("head_dim") or hidden // heads
    attention = hidden * dim * 2 * (heads + config["num_key_value_heads"])
    weights = attention + 3 * hidden * config["intermediate_size"]
    pairs = num_tokens * (num_tokens + 1) / 2  # pairs of a query and a key
    return config["num_hidden_layers"] * (2 * num_tokens * weights + 4 * heads * dim * pairs)
