"""What is read from the files of DFlash heads, and which are refused."""

import jax
import numpy as np
import pytest
from support.dflash import IN_CONFIG, MASK, SWA, VOCAB, torch, write_head

from specjax import LLM
from specjax.checkpoint.errors import CheckpointError
from specjax.config import SpeculativeConfig
from specjax.device.drafters.dflash import AttentionMask
from specjax.device.drafters.registry import drafter_from_config, load_drafter
from specjax.device.models.registry import load_model


@pytest.fixture(scope="module")
def target(checkpoints):
    return checkpoints.target("llama", vocab_size=VOCAB, num_hidden_layers=3)


MIXED = ["sliding_attention", "full_attention"]
MASKS = {
    "full": ({}, [AttentionMask(), AttentionMask()]),
    "causal": ({"is_causal": True}, [AttentionMask(ahead=0)] * 2),
    "causal-in-own-config": (
        {"dflash_config": {**IN_CONFIG, "causal": True}},
        [AttentionMask(ahead=0)] * 2,
    ),
    "mixed": ({"layer_types": MIXED}, [AttentionMask(back=4, ahead=0), AttentionMask()]),
    "mixed-non-causal": (
        {"layer_types": MIXED, "is_causal": False},
        [AttentionMask(back=4, ahead=4), AttentionMask()],
    ),
    "swa": ({"dflash_config": SWA}, [AttentionMask(back=1, ahead=1)] * 2),
    "swa-causal": (
        {"dflash_config": {**SWA, "causal": True}},
        [AttentionMask(back=1, ahead=0)] * 2,
    ),
    "swa-of-one-layer": (
        {"dflash_config": SWA, "layer_types": MIXED},
        [AttentionMask(back=1, ahead=0), AttentionMask()],
    ),
}


@pytest.mark.parametrize("edits, attention_masks", MASKS.values(), ids=MASKS)
def test_what_rows_see_is_read_from_the_authors_configs(target, tmp_path, edits, attention_masks):
    files = write_head(tmp_path / "head", target.hf.config.hidden_size, **edits)
    drafter, _ = load(target, files.folder)
    assert drafter.head.attention_masks == tuple(attention_masks)


def load(target, folder):
    config = SpeculativeConfig(method="dflash", model="", num_speculative_tokens=3)
    model, _ = load_model(target.folder, np.dtype("float32"))
    return load_drafter(folder, config, model, np.dtype("float32"))


def test_a_config_alone_gives_the_head_that_the_weights_have(target, tmp_path):
    folder = write_head(tmp_path / "head", target.hf.config.hidden_size).folder
    drafter, params = load(target, folder)
    (folder / "model.safetensors").unlink()
    model, _ = load_model(target.folder, np.dtype("float32"))
    config = SpeculativeConfig(method="dflash", model="", num_speculative_tokens=3)
    described, shapes = drafter_from_config(folder, config, model, "float32")
    assert described == drafter
    assert jax.tree.map(lambda x: (x.shape, x.dtype), params) == jax.tree.map(
        lambda x: (x.shape, x.dtype), shapes
    )
    config = SpeculativeConfig(method="eagle", model="", num_speculative_tokens=3)
    with pytest.raises(CheckpointError, match="has no weights, .* method 'eagle'"):
        drafter_from_config(folder, config, model, "float32")


@pytest.mark.parametrize("old, new", [("layers.0.", "midlayer."), ("", "model.")])
def test_names_of_other_exports(target, tmp_path, rewrite_tensors, old, new):
    files = write_head(tmp_path / "head", target.hf.config.hidden_size)
    expected = load(target, files.folder)

    def rename(tensors):
        names = {n: new + n.removeprefix(old) if n.startswith(old) else n for n in tensors}
        return {names[name]: x for name, x in tensors.items()}

    rewrite_tensors(files.folder / "model.safetensors", rename)
    drafter, params = load(target, files.folder)
    assert drafter == expected[0]
    jax.tree.map(np.testing.assert_array_equal, params, expected[1])


REFUSED = {
    "block": ({"block_size": 3}, "block_size=3 .* 2 drafts; lower .*tokens=3"),
    "block-of-one": ({"block_size": 1}, "block_size=1 leaves no drafts"),
    "block-of-none": ({"block_size": 0}, "block_size must be a positive integer, got 0"),
    "no-mask": (
        {"dflash_config": {}, "mask_token_id": None},
        "mask_token_id=None must be one of the target's 24",
    ),
    "own-vocabulary": ({"draft_vocab_size": 15}, "draft_vocab_size=15 needs a lm_head"),
    "another-width": ({"hidden_size": 30}, "head is 30 wide .* which is 32 wide"),
    "more-layers": ({"num_hidden_layers": 3, "layer_types": None}, "missing: layers.2."),
    "gated": (
        {"architectures": ["Qwen3DSparkModel"], "markov_head_type": "gated"},
        "markov_head_type='gated' is not supported",
    ),
    "groups": (
        {"architectures": ["DFlash2DraftModel"], "dflash_config": {"conv_group_size": 5}},
        "conv_group_size=5 must divide hidden_size=32",
    ),
    "candidates": (
        {"architectures": ["DFlash2DraftModel"], "draft_vocab_size": 15},
        "draft vocabulary is not supported",
    ),
    "domino": (
        {"dflash_config": {**IN_CONFIG, "projector_type": "domino"}},
        "projector_type='domino' is not supported",
    ),
    "sinks": (
        {"dflash_config": {"attention_sink_bias": True}},
        "attention_sink_bias=True is not supported; use a head with False",
    ),
    "mask": ({"dflash_config": {"mask_token_id": VOCAB}}, "mask_token_id=24 must be one of .* 24"),
    "layers": (
        {"dflash_config": {"mask_token_id": 1, "target_layer_ids": [2]}},
        r"outputs of layers \[2\], .* the target has 0..2",
    ),
    "window": (
        {"layer_types": ["sliding_attention"] * 2, "sliding_window": None},
        "sliding_window is not set",
    ),
    "windows": ({"layer_types": ["sliding_attention"]}, "layer_types must name .* each of .*=2"),
    "window-of-none": (
        {"dflash_config": SWA | {"swa_window_size": 0}},
        "window 0 must be at least 1",
    ),
    "vocabulary": ({"vocab_size": 30}, "vocab_size=30 .* the target's 24"),
}


def refused(target, folder, message):
    speculation = {"method": "dflash", "model": str(folder), "num_speculative_tokens": 3}
    with pytest.raises(CheckpointError, match=message):
        LLM(target.folder, speculative_config=speculation, verbose=False)


@pytest.mark.parametrize("edits, message", REFUSED.values(), ids=REFUSED)
def test_heads_that_do_not_fit_are_refused(target, tmp_path, edits, message):
    files = write_head(tmp_path / "head", target.hf.config.hidden_size, **edits)
    refused(target, files.folder, message)


def test_tensors_that_do_not_fit_are_refused(target, tmp_path, rewrite_tensors):
    folder = write_head(tmp_path / "head", target.hf.config.hidden_size).folder
    torch.save({"mask_token_id": MASK}, folder / "mask_embedding.pt")
    refused(target, folder, "mask_embedding.pt must .* 'embedding'; it has .*")
    torch.save({"embedding": torch.ones(5)}, folder / "mask_embedding.pt")
    refused(target, folder, r"mask_embedding \(expected \[32\], found \[5\]\)")
    (folder / "mask_embedding.pt").unlink()
    file, hidden = folder / "model.safetensors", {"mask_hidden": torch.ones(1, 1, 64)}
    rewrite_tensors(file, lambda old: old | hidden)
    refused(target, folder, "mask_hidden")
    rewrite_tensors(file, lambda old: {**old, "fc.weight": torch.ones(32, 32)})
    rewrite_tensors(file, lambda old: {n: x for n, x in old.items() if n != "mask_hidden"})
    refused(target, folder, r"fc.weight \(expected \[32, 64\], found \[32, 32\]\)")
