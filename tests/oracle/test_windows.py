"""Sliding-window layers in an engine that preempts, reuses pages and drafts.

Pages behind the windows are freed while requests run. Before each step, all free pages that cannot
be found are filled with NaN, so that reading one would change tokens.
"""

from collections import Counter
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.marks import marked

from specjax.device.cache.pages import Pages
from specjax.device.drafters.draft_model import DraftModel, DraftModelParams, ModelWeights
from specjax.device.drafters.ngram import NGramDrafter

pytestmark = pytest.mark.slow

pytest.importorskip("torch")


@partial(jax.jit, donate_argnums=0)
def spoil(caches, unused):
    """Fill the unused pages of each cache [layers, pages, ...] with NaN."""
    return tuple(
        Pages(jnp.where(one.reshape(1, -1, *[1] * (x.ndim - 2)), jnp.nan, x))
        for (x, _), one in zip(caches, unused, strict=True)
    )


def spoil_free_pages(counts, engine):
    """Fill the target's free pages that have no name.

    Their number is added to `counts` by window.
    """
    residents = engine.scheduler.residents
    pools = dict(zip((None, *engine.programs.model.windows), residents.pools, strict=True))
    unused = []
    for kind in engine.target.cache_kinds:
        pages = pools[kind.window]
        is_unused = [p in pages._free and p not in pages._names for p in range(pages.num_pages)]
        unused.append(np.array(is_unused))
        counts[kind.window] += sum(is_unused)
    (window,) = residents.windows
    counts["given back"] += sum(window._first)
    state = engine.programs.state
    engine.programs.state = replace(state, caches=spoil(state.caches, tuple(unused)))


def ngrams(model, params):
    return NGramDrafter(1, 3), None


def itself(model, params):
    return DraftModel(ModelWeights(model)), DraftModelParams(params)


CASES = {  # the type, what it has of its own, drafter, windows, layers by kind
    "gpt_oss": (
        "gpt_oss",
        {"num_hidden_layers": 3, "sliding_window": 7},
        ngrams,
        (7, None),
        (0, 1, 0),
    ),
    "gemma3": (
        "gemma3_text",
        {"sliding_window": 7},
        ngrams,
        (7, None),
        (0, 1),
    ),
    # Its layers' windows are the target's, but in the drafter's pages nothing is given back.
    "mistral by itself": ("mistral", {"sliding_window": 10}, itself, (10,), (0, 0)),
    "qwen3": (
        "qwen3",
        {
            "head_dim": 8,
            "use_sliding_window": True,
            "sliding_window": 11,
            "max_window_layers": 1,
        },
        ngrams,
        (None, 11),
        (0, 1),
    ),
}


@pytest.mark.parametrize("name", marked(CASES, fast=["gemma3"], slow=["mistral by itself"]))
def test_tokens_are_those_of_plain_decoding(name, checkpoints, check_tokens):
    kind, sizes, make_drafter, windows, kinds = CASES[name]
    target = checkpoints.target(kind, **sizes)
    counts = Counter()
    engine = check_tokens(target, make_drafter, between=partial(spoil_free_pages, counts))
    assert all(counts[what] > 100 for what in (*windows, "given back")), counts
    assert tuple(kind.window for kind in engine.target.cache_kinds) == windows
    assert engine.target.layer_kinds == kinds
    (window,) = engine.scheduler.residents.windows
    assert window.pages.num_free == window.pages.num_pages
    metrics = engine.metrics()
    if make_drafter is itself:
        assert metrics.num_accepted_tokens == metrics.num_draft_tokens > 100
    else:
        assert 0 < metrics.num_accepted_tokens < metrics.num_draft_tokens
