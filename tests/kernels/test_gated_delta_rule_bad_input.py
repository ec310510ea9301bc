"""What the gated delta rule says of arguments that it does not take."""

import contextlib
from functools import partial
from typing import Any

import jax
import numpy as np
import pytest
from support.kernels_delta_rule import EPS, Serving, Sizes, Streams

from pallas_kernels.dispatch import UnsupportedError
from pallas_kernels.gated_delta_rule import (
    DeltaRuleCache,
    DeltaRuleWeights,
    Heads,
    gated_delta_rule,
)
from pallas_kernels.gated_delta_rule.triton import gated_delta_rule_triton
from pallas_kernels.gated_delta_rule.triton.tuning import DeltaRuleTuning


@pytest.mark.parametrize(
    "name, shapes",
    [
        ("x", {"x": (2, 168)}),
        ("x", {"x": (2, 4, 168)}),
        ("x", {"x": (2, 3, 167)}),
        ("x", {"x": (2, 3, 96)}),
        ("x", {"positions": (2, 4)}),
        ("x", {"positions": (6,)}),
        ("weights.conv", {"conv": (96, 4)}),
        ("weights.conv", {"conv": (4, 1, 96)}),
        ("weights.conv", {"conv": (9, 96)}),
        ("weights.log_decay and weights.decay_bias", {"log_decay": (2,)}),
        ("weights.log_decay and weights.decay_bias", {"decay_bias": (4, 1)}),
        ("weights.norm", {"norm": (4,)}),
        ("weights.norm", {"norm": (4, 16)}),
        ("slots and pending", {"slots": (3,)}),
        ("slots and pending", {"slots": (2, 1)}),
        ("slots and pending", {"pending": (3,)}),
        ("slots and pending", {"pending": ()}),
        ("cache", {"state": (5, 4, 16, 8)}),
        ("cache", {"ring": (5, 6, 96)}),
        ("cache", {"u": (2, 5, 3, 64)}),
        ("cache", {"k": (2, 5, 6, 16)}),
        ("cache.k", {"k": (2, 5, 6, 3, 8)}),  # 3 key heads of 4
        ("cache.k", {"k": (2, 5, 6, 0, 8)}),  # no keys
        ("cache.k", {"k": (2, 5, 5, 2, 8)}),
        ("cache.state", {"k": (2, 5, 6, 2, 4)}),
        ("cache.state", {"u": (2, 5, 3, 2, 16)}),
        ("cache.ring", {"ring": (2, 5, 6, 104)}),
        ("cache.ring", {"ring": (3, 5, 6, 96)}),
        ("cache.ring", {"ring": (2, 5, 2, 96)}),  # less than M
        ("cache.u", {"u": (2, 6, 3, 4, 16)}),
        ("cache.decay", {"decay": (2, 5, 6, 4, 1)}),
        ("cache.decay", {"decay": (2, 5, 3, 4)}),
    ],
)
def test_shapes_that_do_not_fit_are_named(name, shapes):
    fitting = {
        "x": (2, 3, 168),
        "conv": (4, 96),
        "log_decay": (4,),
        "decay_bias": (4,),
        "norm": (16,),
        "state": (2, 5, 4, 16, 8),
        "ring": (2, 5, 6, 96),
        "u": (2, 5, 3, 4, 16),
        "k": (2, 5, 6, 2, 8),
        "decay": (2, 5, 6, 4),
        "slots": (2,),
        "positions": (2, 3),
        "pending": (2,),
    }
    arrays: dict[str, Any] = {
        key: np.zeros(shape, np.int32 if key in ("slots", "positions", "pending") else np.float32)
        for key, shape in (fitting | shapes).items()
    }
    x, *others, slots, positions, pending = arrays.values()
    weights, cache = DeltaRuleWeights(*others[:4]), DeltaRuleCache(*others[4:])
    with pytest.raises(ValueError, match=f"^{name} (must|has)"):
        gated_delta_rule(
            *(x, weights, cache, np.int32(0), slots, positions, pending), folds=False, eps=EPS
        )


def test_kernels_that_do_not_exist_are_named():
    serving = Serving("cuda", Streams.random(Sizes(), 1, 9), Sizes())
    with pytest.raises(ValueError, match="kernels='cuda' is unknown; choose one of auto"):
        serving.prompt(9)
    serving.kernels = "mosaic"
    with pytest.raises(
        ValueError, match="gated_delta_rule has no such implementation; it has triton"
    ):
        serving.prompt(9)


def arguments(sizes):
    """Of the kernels, for a token of a request."""
    serving = Serving("reference", Streams.random(sizes, 1, 9), sizes)
    x = np.zeros((1, 1, sizes.heads.inputs), sizes.dtype)
    slots, positions = np.zeros(1, np.int32), np.zeros((1, 1), np.int32)
    return x, serving.weights, serving.cache, np.int32(0), slots, positions, slots


@pytest.mark.parametrize(
    "sizes, message",
    [
        (Sizes(Heads(2, 2, 8, 16)), "D_k=8; the kernel takes 16, 32, 64, 128"),
        (Sizes(Heads(2, 2, 16, 48)), "D_v=48; the kernel takes 16, 32, 64, 128"),
        (Sizes(dtype="float16"), "x is float16; the kernel takes bfloat16, float32"),
    ],
)
def test_what_the_kernel_does_not_take_is_named(sizes, message):
    with pytest.raises(UnsupportedError, match=message):
        gated_delta_rule_triton(*arguments(sizes), folds=False, eps=EPS)


@pytest.mark.parametrize("folds", [False, True])
@pytest.mark.parametrize("field", ["num_warps", "chunk_warps", "norm_heads"])
def test_tiles_that_threads_would_share_are_not_updated_in_place(field, folds):
    config = DeltaRuleTuning(**{field: 2 if field == "norm_heads" else 32})
    run = partial(gated_delta_rule_triton, folds=folds, eps=EPS, config=config, interpret=True)
    is_used = field == "norm_heads" or folds == (field == "chunk_warps")
    with pytest.raises(AssertionError) if is_used else contextlib.nullcontext():
        jax.eval_shape(run, *arguments(Sizes()))
