"""Errors of every operation for arguments that it refuses, without running it."""

import contextlib
from functools import partial
from typing import Any

import jax
import numpy as np
import pytest
from support.kernels_delta_rule import EPS, Sizes
from support.refusals import label

from pallas_kernels.batched_scaled_matmul import batched_scaled_matmul
from pallas_kernels.dispatch import UnsupportedError
from pallas_kernels.draw_tokens import draw_tokens
from pallas_kernels.gated_delta_rule import (
    DeltaRuleCache,
    DeltaRuleWeights,
    Heads,
    gated_delta_rule,
)
from pallas_kernels.gated_delta_rule import triton as delta_rule_triton
from pallas_kernels.gated_delta_rule.triton.tuning import DeltaRuleTuning
from pallas_kernels.grouped_matmul import grouped_matmul
from pallas_kernels.grouped_packed_matmul import grouped_packed_matmul
from pallas_kernels.grouped_scaled_matmul import grouped_scaled_matmul
from pallas_kernels.latent_attention import latent_attention
from pallas_kernels.packed_matmul import FourBits, packed_matmul
from pallas_kernels.paged_attention import paged_attention
from pallas_kernels.rms_norm import add_rms_norm
from pallas_kernels.rope_write import HeadWeights, rope_write
from pallas_kernels.route import Rule, route
from pallas_kernels.scaled_matmul import scaled_matmul
from pallas_kernels.truncation import truncate


def draw(logits, temperature, seeds, counter, **others):
    return draw_tokens(logits, temperature, seeds, 0, (counter,), **others)


def delta_rule(run, x, slots, positions, pending, conv, log_decay, decay_bias, norm, **others):
    weights = DeltaRuleWeights(conv, log_decay, decay_bias, norm)
    cache = DeltaRuleCache(*(others.pop(name) for name in DeltaRuleCache._fields))
    where = np.int32(0), slots, positions, pending
    return run(x, weights, cache, *where, folds=others.pop("folds", False), eps=EPS, **others)


def rope(qkv, bias, q_norm, k_norm, cos, kv, page_table, positions, **others):
    where = np.int32(0), page_table, positions
    weights = HeadWeights(bias, q_norm, k_norm)
    return rope_write(qkv, weights, (cos, cos), kv, *where, num_heads=4, **others)


POOL = {"page_table": (2, 5), "positions": (2, 3)}
# Each operation with arguments that fit: a tuple is an array's shape, all else a value.
OPERATIONS: dict[str, tuple[Any, dict[str, Any]]] = {
    "batched_scaled_matmul": (
        partial(batched_scaled_matmul, block=(64, 32)),
        {
            "x": (5, 3, 80),
            "values": jax.ShapeDtypeStruct((3, 90, 80), "float8_e4m3fn"),
            "scales": (3, 2, 3),
        },
    ),
    "draw_tokens": (
        draw,
        {
            **{"logits": (4, 8), "temperature": (4,), "seeds": (4,), "counter": (4,)},
            **{"token_ids": (8,), "vocab_size": 100},
        },
    ),
    "gated_delta_rule": (
        partial(delta_rule, gated_delta_rule),
        {
            **{"x": (2, 3, 168), "slots": (2,), "positions": (2, 3), "pending": (2,)},
            **{"conv": (4, 96), "log_decay": (4,), "decay_bias": (4,), "norm": (16,)},
            **{"state": (2, 5, 4, 16, 8), "ring": (2, 5, 6, 96), "u": (2, 5, 3, 4, 16)},
            **{"k": (2, 5, 6, 2, 8), "decay": (2, 5, 6, 4)},
        },
    ),
    "grouped_matmul": (
        grouped_matmul,
        {"x": (5, 24), "weights": (3, 24, 40), "group_sizes": (3,)},
    ),
    "grouped_packed_matmul": (
        partial(grouped_packed_matmul, form=FourBits(32), zeros=None, factors=None),
        {
            "x": (5, 96),
            "values": jax.ShapeDtypeStruct((3, 40, 64), "uint8"),
            "scales": jax.ShapeDtypeStruct((3, 3, 40), "uint8"),
            "group_sizes": (3,),
        },
    ),
    "grouped_scaled_matmul": (
        partial(grouped_scaled_matmul, block=(64, 128)),
        {
            "x": (5, 200),
            "values": jax.ShapeDtypeStruct((3, 150, 200), "float8_e4m3fn"),
            "scales": (3, 3, 2),
            "group_sizes": (3,),
        },
    ),
    "latent_attention": (
        partial(latent_attention, layer=np.int32(0), scale=1.0),
        {"q": (2, 3, 4, 80), "pool": (2, 8, 16, 80), **POOL, "rank": 64},
    ),
    "paged_attention": (
        partial(paged_attention, layer=np.int32(0)),
        {"q": (2, 3, 4, 64), "kv": (2, 8, 16, 2, 2, 64), **POOL},
    ),
    "rms_norm": (
        partial(add_rms_norm, eps=EPS),
        {"x": (4, 8), "delta": (4, 8), "weight": (8,)},
    ),
    "rope_write": (
        rope,
        {
            **{"qkv": (2, 3, 512), "bias": (512,), "q_norm": (64,), "k_norm": (64,)},
            **{"cos": (2, 3, 32), "kv": (2, 8, 16, 2, 2, 64), **POOL},
        },
    ),
    "route": (
        route,
        {"logits": (4, 8), "num_chosen": 2, "rule": Rule(True), "correction": (8,)},
    ),
    "packed_matmul": (
        partial(packed_matmul, form=FourBits(32), zeros=None, factors=None),
        {"x": (5, 200), "values": jax.ShapeDtypeStruct((150, 128), "uint8"), "scales": (7, 150)},
    ),
    "scaled_matmul": (
        partial(scaled_matmul, block=(64, 128)),
        {
            "x": (5, 200),
            "values": jax.ShapeDtypeStruct((150, 200), "float8_e4m3fn"),
            "scales": (3, 2),
        },
    ),
    "truncation": (
        truncate,
        {"logits": (3, 8), "temperature": (3,), "top_k": (3,), "top_p": (3,), "min_p": (3,)},
    ),
}
INTEGERS = {
    *("seeds", "counter", "token_ids", "slots", "positions", "pending", "page_table", "origins"),
    *("group_sizes", "sources", "targets", "top_k"),
}


def traced(operation: str, changed: dict[str, Any], **options: Any) -> Any:
    """Trace the operation with some changed arguments. A string changes only the dtype."""
    function, fitting = OPERATIONS[operation]
    arrays = {}
    for name, value in (fitting | changed).items():
        shape, dtype = value, "int32" if name in INTEGERS else "float32"
        if isinstance(value, str):
            shape, dtype = fitting[name], value
        if isinstance(value, jax.ShapeDtypeStruct):
            arrays[name] = value
        elif isinstance(shape, tuple) and not isinstance(shape, Rule | FourBits):
            arrays[name] = jax.ShapeDtypeStruct(shape, dtype)
        else:
            options[name] = value
    return jax.eval_shape(partial(function, **options), **arrays)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_what_fits_is_taken_and_unknown_kernels_are_named(operation):
    assert traced(operation, {}, kernels="reference") is not None
    with pytest.raises(ValueError, match="kernels='cuda' is unknown; choose one of auto"):
        traced(operation, {}, kernels="cuda")


FP8 = "float8_e4m3fn"
# What is said of the scales of pools [2, 8, 16, 2, 2, 64].
OF_SCALES = {
    "scales are for a pool of 8-bit numbers; kv has float32": [{"scales": (2, 2)}],
    r"scales are missing: kv of int8 needs f32\[2, 8, 16, 2, 2\]": [{"kv": "int8"}],
    r"scales of kv in float8_e4m3fn must be f32\[2, 2\]; got float32\[2, 3\]": [
        {"kv": FP8, "scales": (2, 3)}
    ],
    r"scales of kv in int8 must be f32\[2, 8, 16, 2, 2\]": [{"kv": "int8", "scales": (2, 2)}],
}
NAMES = "temperature", "top_k", "top_p", "min_p"
# By what is said: the changes of which it is said, by the operation and then by its kernel.
BAD: dict[str, dict[str, list[dict[str, Any]]]] = {
    "draw_tokens": {
        "logits must": [{"logits": (4, 8, 2)}],
        "temperature and seeds must": [
            {"temperature": (4, 1), "seeds": (4, 1)},
            {"seeds": (8,)},
        ],
        "temperature must": [{"temperature": (3,), "seeds": (3,)}],
        "counters must": [{"counter": (1,)}],
        "token_ids must be .* vocab_size": [{"token_ids": (9,)}, {"vocab_size": None}],
    },
    "gated_delta_rule": {
        "x must": [
            *({"x": shape} for shape in [(2, 168), (2, 4, 168), (2, 3, 167)]),
            *({"positions": shape} for shape in [(2, 4), (6,)]),
        ],
        "weights.conv must": [{"conv": (96, 4)}, {"conv": (4, 1, 96)}],
        "weights.log_decay and weights.decay_bias must": [
            {"log_decay": (2,)},
            {"decay_bias": (4, 1)},
        ],
        "weights.norm must": [{"norm": (4,)}, {"norm": (4, 16)}],
        "slots and pending must": [
            *({"slots": shape} for shape in [(3,), (2, 1)]),
            *({"pending": shape} for shape in [(3,), ()]),
        ],
        "cache must": [
            *({"state": (5, 4, 16, 8)}, {"ring": (5, 6, 96)}),
            *({"u": (2, 5, 3, 64)}, {"k": (2, 5, 6, 16)}),
        ],
        "cache.k must have H_k heads that divide": [{"k": (2, 5, 6, 3, 8)}, {"k": (2, 5, 6, 0, 8)}],
        "cache.k (must|has)": [{"k": (2, 5, 5, 2, 8)}],
        "cache.state (must|has)": [{"k": (2, 5, 6, 2, 4)}],
        "cache.ring (must|has)": [
            {"ring": (2, 5, 6, 104)},
            {"ring": (2, 5, 2, 96)},  # fewer columns than may be pending
        ],
        "cache.u (must|has)": [{"u": (2, 6, 3, 4, 16)}],
        "cache.decay (must|has)": [{"decay": (2, 5, 3, 4)}],
    },
    "grouped_matmul": {
        "x must be": [
            *({"x": shape} for shape in [(24,), (5, 23)]),
            *({"weights": shape} for shape in [(24, 40), (3, 40, 24)]),
        ],
        "group_sizes must be": [{"group_sizes": (2,)}, {"group_sizes": (3, 1)}],
        "sources must be": [{"sources": (5, 1)}],
        "targets must be": [{"targets": (4,)}, {"sources": (4,), "targets": (5,)}],
    },
    "grouped_packed_matmul": {
        "x must be": [{"x": (5,)}, {"values": (3, 40)}],
        r"values must have 64 bytes for each output": [{"values": (3, 40, 48)}],
        r"scales must be \(3, 3, 40\)": [{"scales": (3, 40, 3)}],
        "group_sizes must be": [{"group_sizes": (2,)}],
    },
    "grouped_scaled_matmul": {
        "x must be": [{"x": (5, 190)}, {"values": (150, 200)}],
        r"scales must be \(3, 3, 2\) for blocks": [{"scales": (3, 2, 2)}],
        "sources must be": [{"sources": (5, 1)}],
    },
    "latent_attention": {
        "q must be": [{"q": (2, 3, 80)}, {"positions": (2, 4)}],
        "pool must be .* E=80": [{"pool": (2, 8, 16, 79)}, {"pool": (8, 16, 80)}],
        "page_table must be": [{"page_table": (2,)}, {"page_table": (3, 5)}],
        "rank must be between 0 and E=80": [{"rank": 80}, {"rank": 0}],
    },
    "paged_attention": {
        "q must be": [{"q": (2, 3, 64)}, {"positions": (2, 4)}, {"positions": (6,)}],
        "kv must be": [
            {"kv": shape}
            for shape in [
                *((8, 16, 2, 2, 64), (2, 8, 16, 3, 2, 64)),
                *((2, 8, 16, 2, 2, 32), (2, 8, 16, 2, 3, 64)),
            ]
        ],
        "page_table must be": [{"page_table": (3, 5)}, {"page_table": (2,)}],
        "window must be at least 1": [{"window": 0}],
        "origins need a window": [{"origins": (2, 3)}, {"origins": (2, 1), "window": 3}],
        "soft_cap must be positive": [{"soft_cap": 0.0}],
        r"sinks must be \[H=4\]; got \(3,\)": [{"sinks": (3,)}],
        **OF_SCALES,
    },
    "rms_norm": {
        "x must be": [{"x": (4, 8, 2)}, {"weight": (4,)}],
        "delta must be": [{"delta": (8,)}, {"delta": (2, 8, 4)}],
    },
    "rope_write": {
        "kv must": [{"kv": (8, 16, 2, 2, 64)}, {"kv": (2, 8, 16, 3, 2, 64)}],
        "page_table must": [{"page_table": (1, 5)}, {"page_table": (2,)}],
        "positions must": [{"positions": (3,)}],
        "qkv must": [{"qkv": shape} for shape in [(2, 4, 512), (2, 3, 500), (2, 3, 448)]],
        "angles must": [{"cos": (2, 3, 33)}, {"cos": (2, 4, 32)}],
        "weights.bias must": [{"bias": (64,)}],
        "weights.k_norm must": [{"k_norm": (512,)}],
        **OF_SCALES,
    },
    "route": {
        r"logits must be floats \[N, E\]": [{"logits": (8,)}, {"logits": "int32"}],
        "num_chosen must be 1 to E=8; got": [{"num_chosen": 9}, {"num_chosen": 0}],
        "rule.num_groups must divide E=8; got 3": [{"rule": Rule(True, num_groups=3)}],
        "correction and groups need rule.is_sigmoid": [{"rule": Rule()}],
        r"correction must be \[E=8\]; got \(7,\)": [{"correction": (7,)}],
        r"is_padding must be bool\[N=4\]; got float32\(4,\)": [{"is_padding": (4,)}],
    },
    "packed_matmul": {
        "x must be": [{"x": (200,)}, {"values": (150,)}],
        r"values must have 128 bytes for each output, for 200 inputs": [
            {"values": jax.ShapeDtypeStruct((150, 96), "uint8")}
        ],
        r"scales must be \(7, 150\) for groups of 32": [{"scales": (6, 150)}],
        r"zeros must be \(7, 150\)": [{"zeros": (150, 7)}],
        r"factors must be \(150,\)": [{"factors": (7,)}],
    },
    "scaled_matmul": {
        "x must be": [{"x": (200,)}, {"x": (5, 150)}, {"values": (200,)}],
        r"scales must be \(3, 2\) for blocks of \(64, 128\)": [{"scales": (2, 3)}],
    },
    "truncation": {
        r"logits must be \[N, V": [{"logits": (8,)}],
        **{rf"{name} must be \[N=3": [{name: (4,)}] for name in NAMES},
    },
}


def of_heads(sizes):
    """Return arguments of the gated delta rule for these sizes."""
    heads = sizes.heads
    return {
        "x": jax.ShapeDtypeStruct((2, 3, heads.inputs), sizes.dtype),
        **sizes.cache(2, 5)._asdict(),
        **{"conv": (sizes.taps, heads.channels), "norm": (heads.value_dim,)},
        **dict.fromkeys(("log_decay", "decay_bias"), (heads.num_values,)),
    }


def of_dim(dim):
    """Return arguments of rope_write for heads of width `dim`."""
    norms = dict.fromkeys(("q_norm", "k_norm"), (dim,))
    wide = {"qkv": (2, 3, 8 * dim), "bias": (8 * dim,), "cos": (2, 3, dim // 2)}
    return {**wide, **norms, "kv": (2, 8, 16, 2, 2, dim)}


LARGE_POOL = jax.ShapeDtypeStruct((64, 3 * 2**11, 16, 2, 4, 64), FP8)
UNSUPPORTED: dict[str, dict[str, dict[str, Any]]] = {
    "draw_tokens": {"logits are bfloat16; float32": {"logits": "bfloat16"}},
    "gated_delta_rule": {
        "D_k=8; the kernel takes 16, 32, 64, 128": of_heads(Sizes(Heads(2, 2, 8, 16))),
        "D_v=48; the kernel takes 16, 32, 64, 128": of_heads(Sizes(Heads(2, 2, 16, 48))),
        "x is float16; the kernel takes bfloat16, float32": of_heads(Sizes(dtype="float16")),
    },
    "grouped_matmul": {
        "share a dtype of bfloat16, float16, float32; got": {"x": "bfloat16"},
        "at most; got 5000": {"weights": (5000, 24, 1), "group_sizes": (5000,)},
    },
    "grouped_packed_matmul": {"dtype of bfloat16, float32; got float16": {"x": "float16"}},
    "grouped_scaled_matmul": {
        "values one of float8_e4m3fn, int8; got": {"values": (3, 150, 200)},
        r"2\^31 numbers at most, or more than 2\^32 bytes": {  # which Pallas would index wrongly
            "values": jax.ShapeDtypeStruct((3, 2**22, 200), "float8_e4m3fn"),
            "scales": (3, 2**16, 2),
        },
    },
    "latent_attention": {"rank 60": {"rank": 60}, "page_size 2": {"pool": (2, 8, 2, 80)}},
    "paged_attention": {
        "head dimension D 32: .* takes 64, 128, 256": {
            **{"q": (2, 3, 4, 32), "kv": (2, 8, 16, 2, 2, 32)},
        },
        "page_size 8: .* takes 16, 32, 64, 128": {"kv": (2, 8, 8, 2, 2, 64)},
        "dtype of q float16: .* takes bf": {"q": "float16", "kv": "float16"},
        "in bfloat16: float32: .* takes bfloat16, float8_e4m3fn, int8": {"q": "bfloat16"},
        "(?m)in float32: bfloat16: .* takes float32$": {"kv": "bfloat16"},
        "a pool of 3.0 GiB in float8_e4m3fn": {  # which Pallas would index wrongly
            **{"q": "bfloat16", "kv": LARGE_POOL},
        },
    },
    "packed_matmul": {
        "x must have a dtype of bfloat16, float32; got float16": {"x": "float16"},
        "groups of 8 must have a multiple of 16": {
            "form": FourBits(8),
            "scales": (25, 150),
            "values": jax.ShapeDtypeStruct((150, 104), "uint8"),
        },
        r"fewer than 2\^31 bytes": {
            "values": jax.ShapeDtypeStruct((2**24, 128), "uint8"),
            "scales": (7, 2**24),
        },
    },
    "rms_norm": {"D=32768; at most": {"x": (1, 2**15), "delta": (1, 2**15), "weight": (2**15,)}},
    "rope_write": {
        **{"D=48": of_dim(48), "D=8": of_dim(8)},
        "a pool of 3.0 GiB in float8_e4m3fn": {
            **{"qkv": (2, 3, 768), "bias": (768,), "kv": LARGE_POOL},
        },
    },
    "scaled_matmul": {
        "values float8_e4m3fn or int8; got": {"values": (150, 200)},
        r"fewer than 2\^31 numbers": {
            "values": jax.ShapeDtypeStruct((2**24, 200), FP8),
            "scales": (2**18, 2),
        },
    },
    "truncation": {"logits must be float32; got bfloat16": {"logits": "bfloat16"}},
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "operation, message, changed, error",
    [
        (operation, message, changed, error)
        for table, error in ((BAD, ValueError), (UNSUPPORTED, UnsupportedError))
        for operation, messages in table.items()
        for message, changes in messages.items()
        for changed in (changes if type(changes) is list else [changes])
    ],
)
def test_what_is_not_taken_is_named(operation, message, changed, error):
    """Some arguments are refused by all implementations, others only by a kernel."""
    with pytest.raises(error, match=message if error is UnsupportedError else f"^{message}"):
        traced(operation, changed, kernels="interpret")


SMALL_TILES = {"values": 2}, {"folds": True, "chunk_values": 2}, {"norm_heads": 1}


@pytest.mark.slow
@pytest.mark.parametrize("small", SMALL_TILES, ids=label)
def test_a_tile_smaller_than_its_threads_is_never_run(small, monkeypatch):
    """Several threads would have copies of an element, and one could read another's write."""
    sizes = of_heads(Sizes()) | {"folds": small.get("folds", False)}
    tuning = DeltaRuleTuning(**{name: value for name, value in small.items() if name != "folds"})
    for config in tuning, DeltaRuleTuning():
        monkeypatch.setattr(delta_rule_triton, "choose_tuning", lambda batch, made=config: made)
        refused = pytest.raises(AssertionError, match="DeltaRuleTuning")
        with refused if config == tuning else contextlib.nullcontext():
            traced("gated_delta_rule", sizes, kernels="interpret")
