"""Files of drafters: what is read from each layout, and which files are refused."""

import jax
import numpy as np
import pytest
from support.dflash import IN_CONFIG, MASK, SWA, VOCAB, write_head
from support.refusals import refusal

from specjax import LLM
from specjax.checkpoint.errors import CheckpointError
from specjax.config import SpeculativeConfig
from specjax.device.drafters.dflash import AttentionMask
from specjax.device.drafters.registry import drafter_from_config, load_drafter
from specjax.device.models.registry import load_model
from specjax.rl.weights import stage_drafter

torch = pytest.importorskip("torch")

FLOAT32 = np.dtype(np.float32)


@pytest.fixture(scope="module")
def target(checkpoints):
    return checkpoints.target("llama", vocab_size=VOCAB, num_hidden_layers=3)


@pytest.fixture
def write(target, tmp_path):
    """Return a function that writes a DFlash head."""
    return lambda **options: write_head(tmp_path / "head", target.hf.config.hidden_size, **options)


def load(target, method, folder):
    """Load the drafter in `folder` for `target`; return it with its parameters."""
    config = SpeculativeConfig(method=method, model="", num_speculative_tokens=3)
    model, _ = load_model(target, FLOAT32)
    return load_drafter(folder, config, model, FLOAT32)


def check_same(one, other):
    """Check that two pairs (drafter, parameters) are equal."""
    assert one[0] == other[0]
    jax.tree.map(np.testing.assert_array_equal, one[1], other[1])


def refused(target, method, folder, *words):
    """Check that an LLM refuses the drafter in `folder` (None: the target's own) with `words`."""
    speculation = {"method": method, "num_speculative_tokens": 3}
    if folder is not None:
        speculation["model"] = str(folder)
    with pytest.raises(CheckpointError) as error:
        LLM(target, speculative_config=speculation, verbose=False)
    assert all(str(word) in str(error.value) for word in words), error.value


# --- layouts --------------------------------------------------------------------------------------


def test_eagle_heads_with_what_says_nothing(checkpoints, target):
    """A copy of the target's embedding is shared; a bias that only the config has is ignored."""
    plain, copied = (
        checkpoints.eagle(target, **options).folder
        for options in ({}, {"embedding": "same", "bias": True})
    )
    model, params = load_model(target.folder, FLOAT32)
    drafter, head = load(target.folder, "eagle", copied)
    check_same(drafter.share(head, model, params), load(target.folder, "eagle", plain))


SIZES = {"draft_vocab": 15, "rope_theta": 5e2, "rms_norm_eps": 0.1, "num_attention_heads": 2}


@pytest.mark.parametrize(
    "method, says, means",
    [
        # EAGLE-3 norms before the residual by default, and P-EAGLE does not.
        ("eagle3", {}, {"norm_before_residual": True}),
        ("eagle3", {"norm_before_residual": False}, {}),
        ("p_eagle", {"ptd_token_id": MASK, "num_layers": 1}, {"pard_token": MASK, "num_layers": 1}),
    ],
)
def test_speculators_layout_gives_the_same_head_as_the_raw_one(
    checkpoints, target, method, says, means
):
    make = getattr(checkpoints, method)
    found, expected = (
        load(target.folder, method, make(target, **SIZES, **options).folder)
        for options in ({"layout": "speculators"} | says, means)
    )
    assert found[0].head.norm_before_residual == means.get("norm_before_residual", False)
    check_same(found, expected)


@pytest.mark.slow
def test_every_layout_of_an_mtp_module_gives_the_same_parameters(checkpoints):
    """The module is in the target's file or in another. Experts have one tensor or many."""
    target = checkpoints.target("qwen3_5_moe_text", vocab_size=VOCAB)
    folders = [
        checkpoints.mtp(of, layout=layout, is_beside=is_beside).folder
        for of in (target, checkpoints.fused(target))
        for layout in ("fused", "single")
        for is_beside in (False, True)
    ]
    first, *others = (load(folder, "mtp", folder) for folder in folders)
    for one in others:
        check_same(one, first)


@pytest.mark.parametrize("old, new", [("layers.0.", "midlayer."), ("", "model.")])
def test_names_of_dflash_heads_in_other_exports(target, write, rewrite_tensors, old, new):
    folder = write().folder
    expected = load(target.folder, "dflash", folder)

    def rename(tensors):
        names = {n: new + n.removeprefix(old) if n.startswith(old) else n for n in tensors}
        return {names[name]: x for name, x in tensors.items()}

    rewrite_tensors(folder / "model.safetensors", rename)
    check_same(load(target.folder, "dflash", folder), expected)


MIXED = ["sliding_attention", "full_attention"]
FULL = AttentionMask()
MASKS = {
    "full": ({}, [FULL, FULL]),
    "untyped": ({"layer_types": None}, [FULL, FULL]),
    "causal": ({"is_causal": True}, [AttentionMask(ahead=0)] * 2),
    "causal-in-own-config": (
        {"dflash_config": {**IN_CONFIG, "causal": True}},
        [AttentionMask(ahead=0)] * 2,
    ),
    "mixed": ({"layer_types": MIXED}, [AttentionMask(back=4, ahead=0), FULL]),
    "mixed-non-causal": (
        {"layer_types": MIXED, "is_causal": False},
        [AttentionMask(back=4, ahead=4), FULL],
    ),
    "swa": ({"dflash_config": SWA}, [AttentionMask(back=1, ahead=1)] * 2),
    "swa-causal": (
        {"dflash_config": {**SWA, "causal": True}},
        [AttentionMask(back=1, ahead=0)] * 2,
    ),
    "swa-of-one-layer": (
        {"dflash_config": SWA, "layer_types": MIXED},
        [AttentionMask(back=1, ahead=0), FULL],
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("edits, masks", MASKS.values(), ids=MASKS)
def test_what_rows_see_is_read_from_the_authors_configs(target, write, edits, masks):
    drafter, _ = load(target.folder, "dflash", write(**edits).folder)
    assert drafter.head.attention_masks == tuple(masks)


def test_a_config_alone_gives_the_head_that_the_weights_have(target, write):
    folder = write().folder
    drafter, params = load(target.folder, "dflash", folder)
    (folder / "model.safetensors").unlink()
    model, _ = load_model(target.folder, FLOAT32)
    config = SpeculativeConfig(method="dflash", model="", num_speculative_tokens=3)
    described, shapes = drafter_from_config(folder, config, model, "float32")
    assert described == drafter
    told, found = (jax.tree.map(lambda x: (x.shape, x.dtype), x) for x in (shapes, params))
    assert told == found
    config = SpeculativeConfig(method="eagle", model="", num_speculative_tokens=3)
    refusal(
        lambda: drafter_from_config(folder, config, model, "float32"),
        "has no weights, but method 'eagle'",
    )


def test_weights_are_updated_under_their_published_names(checkpoints, target):
    files = checkpoints.p_eagle(target, pard_token=MASK)
    drafter, params = load(target.folder, "p_eagle", files.folder)
    sources = stage_drafter({name: x.numpy() for name, x in files.tensors.items()}, drafter, params)
    assert len(sources) == len(jax.tree.leaves(params))


# --- refusals -------------------------------------------------------------------------------------

DFLASH2 = {"architectures": ["DFlash2DraftModel"]}
# By the config's fields that are edited: what is said.
DFLASH = {
    "block": ({"block_size": 3}, "block_size=3", "2 drafts; lower", "tokens=3"),
    "block-of-one": ({"block_size": 1}, "block_size=1 leaves no drafts"),
    "block-of-none": ({"block_size": 0}, "block_size must be a positive integer, got 0"),
    "no-mask": (
        {"dflash_config": {}, "mask_token_id": None},
        "mask_token_id=None must be one of the target's 24",
    ),
    "own-vocabulary": ({"draft_vocab_size": 15}, "draft_vocab_size=15 needs a lm_head"),
    "another-width": ({"hidden_size": 30}, "head is 30 wide", "which is 32 wide"),
    "more-layers": ({"num_hidden_layers": 3, "layer_types": None}, "missing: layers.2."),
    "gated": (
        {"architectures": ["Qwen3DSparkModel"], "markov_head_type": "gated"},
        "markov_head_type='gated' is not supported",
    ),
    "groups": (
        {**DFLASH2, "dflash_config": {"conv_group_size": 5}},
        "conv_group_size=5 must divide hidden_size=32",
    ),
    "candidates": (
        {**DFLASH2, "draft_vocab_size": 15},
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
    "mask": ({"dflash_config": {"mask_token_id": VOCAB}}, "mask_token_id=24 must be one of", "24"),
    "layers": (
        {"dflash_config": {"mask_token_id": 1, "target_layer_ids": [2]}},
        "outputs of layers [2]",
        "the target has 0..2",
    ),
    "window": (
        {"layer_types": ["sliding_attention"] * 2, "sliding_window": None},
        "sliding_window is not set",
    ),
    "windows": ({"layer_types": MIXED[:1]}, "layer_types must name ", "each of", "=2"),
    "windows-in-lists": ({"layer_types": [[one] for one in MIXED]}, "layer_types must name ", "[["),
    "window-of-none": (
        {"dflash_config": SWA | {"swa_window_size": 0}},
        "window 0 must be at least 1",
    ),
    "vocabulary": ({"vocab_size": 30}, "vocab_size=30", "target's 24"),
}


@pytest.mark.slow
@pytest.mark.parametrize("edits, words", [(e, w) for e, *w in DFLASH.values()], ids=DFLASH)
def test_dflash_heads_that_do_not_fit_are_refused(target, write, edits, words):
    refused(target.folder, "dflash", write(**edits).folder, *words)


def test_tensors_of_dflash_heads_that_do_not_fit_are_refused(target, write, rewrite_tensors):
    folder = write().folder
    beside, file = folder / "mask_embedding.pt", folder / "model.safetensors"
    torch.save({"mask_token_id": MASK}, beside)
    says = "mask_embedding.pt must contain the tensor 'embedding'; it has "
    refused(target.folder, "dflash", folder, says)
    torch.save({"embedding": torch.ones(5)}, beside)
    refused(target.folder, "dflash", folder, "mask_embedding (expected [32], found [5])")
    beside.unlink()
    rewrite_tensors(file, lambda old: old | {"mask_hidden": torch.ones(1, 1, 64)})
    refused(target.folder, "dflash", folder, "mask_hidden")
    rewrite_tensors(file, lambda old: {**old, "fc.weight": torch.ones(32, 32)})
    rewrite_tensors(file, lambda old: {n: x for n, x in old.items() if n != "mask_hidden"})
    refused(target.folder, "dflash", folder, "fc.weight (expected [32, 64], found [32, 32])")


P_EAGLE = {
    "pard_token": (VOCAB, "pard_token=24 must be one of the target's 24 tokens; set it"),
    "vocab_size": (30, "vocab_size=30 differs from the target's 24"),
    "norm_before_residual": ("yes", "norm_before_residual must be true or false"),
    "hidden_size": (40, "40 wide and uses the target's embedding"),
}


def test_p_eagle_heads_that_do_not_fit_are_refused(checkpoints, target):
    head = checkpoints.p_eagle(target, pard_token=MASK).folder
    for field, (value, text) in P_EAGLE.items():
        refused(target.folder, "p_eagle", checkpoints.copy(head, **{field: value}), text)
    nameless = checkpoints.copy(head, pard_token=None)
    refused(target.folder, "p_eagle", nameless, "mask_token_id=None must be one of")
    refused(target.folder, "eagle3", head, "method 'p_eagle'")
    refused(target.folder, "p_eagle", checkpoints.eagle3(target).folder, "no tensor mask_hidden")


def test_targets_without_the_module_that_is_asked_for_are_refused(checkpoints, target):
    refused(target.folder, "mtp", None, "'mtp'", "'llama'", "qwen3_5")
    hybrid = checkpoints.target("qwen3_5_text", vocab_size=VOCAB).folder
    refused(hybrid, "mtp", None, hybrid, "mtp.fc.weight", "mtp.safetensors")


@pytest.mark.parametrize("kind", ["qwen3_5_text", "qwen3_5"])
def test_a_module_of_two_layers_is_refused(checkpoints, kind):
    files = checkpoints.mtp(checkpoints.target(kind, vocab_size=VOCAB))
    edits = {"mtp_num_hidden_layers": 2}
    if kind == "qwen3_5":
        edits = {"text_config": {**files.config, **edits}}
    refused(checkpoints.copy(files.folder, **edits), "mtp", None, "mtp_num_hidden_layers=2")


@pytest.mark.parametrize(
    "num_modules, lost",
    [(0, "no tensor model.layers.2.eh_proj.weight"), (1, "missing: model.layers.3.")],
)
def test_modules_that_are_not_there_of_two_are_told(checkpoints, num_modules, lost):
    files = checkpoints.target("deepseek_v3", vocab_size=VOCAB)
    if num_modules:
        files = checkpoints.mtp(files, layout="single")
    refused(checkpoints.copy(files.folder, num_nextn_predict_layers=2), "mtp", None, lost)


@pytest.mark.parametrize("is_beside", [False, True])
def test_tensors_of_an_mtp_module_are_all_accounted_for(checkpoints, rewrite_tensors, is_beside):
    target = checkpoints.target("qwen3_5_text", vocab_size=VOCAB)
    files = checkpoints.mtp(target, is_beside=is_beside)
    for name, fault in (
        ("mtp.norm.weight", "missing"),
        ("mtp.layers.0.self_attn.q_norm.weight", "missing"),
        ("mtp.layers.1.input_layernorm.weight", "unexpected"),
        ("mtp.fc.weight", "wrong shape"),
    ):

        def change(tensors, name=name, fault=fault):
            others = {n: x for n, x in tensors.items() if n != name}
            return others if fault == "missing" else others | {name: torch.zeros(4)}

        folder = checkpoints.copy(files.folder)
        rewrite_tensors(folder / ("mtp.safetensors" if is_beside else "model.safetensors"), change)
        refused(folder, "mtp", None, fault, name)


def test_mixed_layouts_of_experts_are_refused(checkpoints, rewrite_tensors):
    files = checkpoints.mtp(checkpoints.target("qwen3_5_moe_text", vocab_size=VOCAB))
    folder = checkpoints.copy(files.folder)
    single = "mtp.layers.0.mlp.experts.0.up_proj.weight"
    rewrite_tensors(folder / "model.safetensors", lambda old: old | {single: torch.zeros(24, 32)})
    refused(folder, "mtp", None, single, "mtp.layers.0.mlp.experts.gate_up_proj")
