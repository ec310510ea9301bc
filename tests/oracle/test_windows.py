"""Layers that attend within a window, in an engine that preempts, reuses pages and drafts."""

import pytest

from specjax.device.drafters.ngram import NGramDrafter

pytest.importorskip("torch")


def test_windows_with_drafts_of_ngrams(checkpoints, check_tokens):
    """The first of three layers attends to everything, the others to less than most prompts."""
    target = checkpoints.target(
        "qwen3",
        num_hidden_layers=3,
        head_dim=8,
        use_sliding_window=True,
        sliding_window=11,
        max_window_layers=1,
    )
    engine = check_tokens(target, NGramDrafter(1, 3))
    assert [kind.window for kind in engine.target.cache_kinds] == [None, 11]
    assert engine.target.layer_kinds == (0, 1, 1)
