"""Text models inside other models, and tensors with other names, compared with transformers.

The families have the same sizes inside and outside, so that many share a compiled program.
"""

import jax
import numpy as np
import pytest
from support.logits import causal_logits, hf_logits

from specjax import LLM
from specjax.checkpoint.errors import CheckpointError
from specjax.device.models.registry import load_model
from specjax.device.models.text_config import WRAPPERS
from specjax.rl.weights import read_named, stage_target

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

FLOAT32 = np.dtype(np.float32)
TIED = {"tie_word_embeddings": True}
MINISTRAL = {
    "model_type": "ministral3",
    "head_dim": 8,
    "rope_parameters": {
        **{"rope_type": "yarn", "rope_theta": 300.0, "factor": 4.0},
        **{"original_max_position_embeddings": 16, "llama_4_scaling_beta": 0.3},
    },
}
# By the model type of the whole: fields of its text model. test_models.py has Qwen3.5's.
WHOLES = dict.fromkeys(
    ("qwen2_vl", "qwen3_vl", "qwen3_vl_moe", "llava", "internvl", "idefics3", "smolvlm", "voxtral"),
    {},
) | {
    "qwen2_5_vl": TIED,
    "glm4v_moe": {"num_hidden_layers": 2},
    "mistral3": {"sliding_window": None},
    "gemma3": TIED,
}
CASES = {kind: (kind, fields) for kind, fields in WHOLES.items()} | {
    "mistral3-ministral": ("mistral3", MINISTRAL),
    # Where gate and up together are as wide as the model, their down projections tell.
    "experts-of-the-same-width": ("qwen3_vl_moe", {"moe_intermediate_size": 16}),
}


@pytest.fixture(scope="module")
def tokens():
    return np.random.default_rng(0).integers(0, 90, (1, 40))


def written(checkpoints, kind="llama", **fields):
    return checkpoints.target(kind, **{"num_hidden_layers": 1} | fields)


def test_every_whole_is_here():
    assert WHOLES.keys() | {"qwen3_5", "qwen3_5_moe"} == WRAPPERS.keys()


@pytest.mark.slow
@pytest.mark.parametrize("kind, fields", CASES.values(), ids=CASES)
def test_text_alone_has_the_same_logits(checkpoints, tokens, kind, fields):
    target = written(checkpoints, kind, **fields)
    expected = hf_logits(target.hf, tokens)
    np.testing.assert_allclose(causal_logits(target.folder, tokens), expected, rtol=0, atol=1e-4)


# --- names ----------------------------------------------------------------------------------------


def read(folder):
    """Load a model; return it, its parameters, and the log lines."""
    lines = []
    return *load_model(folder, FLOAT32, log=lines.append), lines


@pytest.fixture
def rewritten(checkpoints, rewrite_tensors):
    """Return a function that copies a target with changed or further tensors."""

    def copy(target, change=None, more=()):
        made = checkpoints.copy(target.folder)
        more = {name: torch.ones(2) for name in more}
        rewrite_tensors(made / "model.safetensors", change or (lambda old: old | more))
        return made

    return copy


def check_same(folder, other, *words):
    """Check that both folders give the same arrays, and that the first logs a line with `words`."""
    (model, params, lines), (expected, its_params, _) = read(folder), read(other)
    assert model == expected
    jax.tree.map(np.testing.assert_array_equal, params, its_params)
    (line,) = lines or [""]
    assert all(word in line for word in words) and bool(line) == bool(words), lines


ROOTS = [
    ("model.language_model.", "lm_head."),
    ("language_model.model.", "language_model.lm_head."),
    ("language_model.", "lm_head."),
    ("model.language_model.model.", "model.language_model.lm_head."),
    ("model.text_model.", "lm_head."),
    ("", "lm_head."),
]


@pytest.mark.parametrize("root, head", ROOTS)
def test_names_of_other_exports(checkpoints, rewritten, root, head):
    def rename(name):
        part, _, rest = name.partition(".")
        return {"model": root, "lm_head": head}[part] + rest

    target = written(checkpoints)
    made = rewritten(target, lambda tensors: {rename(name): x for name, x in tensors.items()})
    check_same(made, target.folder)


@pytest.mark.parametrize(
    "kind, module", [("qwen3_5_moe", "mtp."), ("glm4v_moe", "model.language_model.layers.2.")]
)
def test_modules_of_a_whole_are_passed_over(checkpoints, rewritten, kind, module):
    target = checkpoints.target(kind)
    names = f"{module}enorm.weight", f"{module}fc.weight"
    model, _, (line,) = read(rewritten(target, more=names))
    assert model == read(target.folder)[0]
    assert f"{module}* (2)" in line and "model.visual.*" in line


OTHERS = (
    "model.visual.blocks.0.attn.weight",
    "vision_tower.layers.0.weight",
    "audio_tower.conv1.weight",
    "multi_modal_projector.linear_1.weight",
    "v_head.summary.weight",
    "score.weight",
)
GROUPS = "model.visual", "vision_tower", "audio_tower", "multi_modal_projector", "v_head", "score"


def test_other_parts_are_named_in_one_line(checkpoints, rewritten):
    target = written(checkpoints)
    groups = [f"{group}.* (1)" for group in GROUPS]
    check_same(rewritten(target, more=OTHERS), target.folder, "not loaded", *groups)


@pytest.mark.parametrize("verbose", [True, False])
@pytest.mark.usefixtures("simulated_device")
def test_lines_are_in_the_log_of_an_llm(checkpoints, caplog, verbose):
    folder = written(checkpoints, "smolvlm").folder
    with caplog.at_level("INFO", "specjax"), LLM(folder, verbose=verbose, max_model_len=32):
        assert ("not part of the text model: model.connector" in caplog.text) == verbose


@pytest.mark.parametrize(
    "name", ["embedder.weight", "model.adapter.weight", "model.layers.0.lora_A", "lm_head.bias"]
)
@pytest.mark.parametrize("kind", ["llama", "mistral3"])
def test_unknown_names_are_refused(checkpoints, rewritten, kind, name):
    made = rewritten(written(checkpoints, kind), more=[name])
    with pytest.raises(CheckpointError, match=rf"unexpected: {name}\n"):
        load_model(made, FLOAT32)


@pytest.mark.parametrize("kind", ["qwen3_vl_moe", "smolvlm"])
def test_updates_by_the_names_of_the_whole(checkpoints, kind):
    """A transformers trainer's experts have another layout than the experts in files."""
    target = written(checkpoints, kind)
    model, params, _ = read(target.folder)
    named = read_named(target.hf.state_dict(), params, "weights")
    sharding = jax.tree.leaves(params)[0].sharding
    sources = stage_target(named, model, params)
    for source, leaf in zip(sources, jax.tree.leaves(params), strict=True):
        np.testing.assert_array_equal(source.copy(leaf.dtype, sharding), leaf)


# --- tied output heads ----------------------------------------------------------------------------

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


@pytest.fixture(scope="module")
def tied(checkpoints):
    return written(checkpoints, **TIED)


def test_another_head_than_the_tied_one_counts(rewritten, tied, tokens):
    folder = rewritten(tied, lambda old: old | {HEAD: torch.flip(old[EMBEDDING], (0,))})
    hf = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    expected = hf_logits(hf.eval(), tokens)
    assert abs(expected - hf_logits(tied.hf, tokens)).max() > 1
    np.testing.assert_allclose(causal_logits(folder, tokens), expected, rtol=0, atol=1e-4)
    model, _, (line,) = read(folder)
    assert not model.tie_word_embeddings
    assert f"{HEAD} differs from {EMBEDDING}" in line and "tie_word_embeddings" in line


@pytest.mark.parametrize("keeps_embedding", [True, False])
def test_a_copy_of_the_tied_head_is_silent(rewritten, tied, keeps_embedding):
    """Some exports have only one of the two tensors, under the other name."""

    def change(tensors):
        both = tensors | {HEAD: tensors[EMBEDDING].clone()}
        return both if keeps_embedding else {n: x for n, x in both.items() if n != EMBEDDING}

    check_same(rewritten(tied, change), tied.folder)


def test_an_update_cannot_untie(tied):
    model, params, _ = read(tied.folder)
    named = read_named(tied.hf.state_dict(), params, "weights")
    assert HEAD in named and stage_target(named, model, params)
    with pytest.raises(ValueError, match=f"{HEAD} that differs from {EMBEDDING}"):
        stage_target(named | {HEAD: named[EMBEDDING] + 1}, model, params)


@pytest.mark.parametrize("theta, words", [(10000.0, ()), (500.0, ("inv_freq", "1 more differ"))])
def test_frequencies_that_old_exports_hold(checkpoints, rewritten, theta, words):
    target = checkpoints.target("llama")
    frequencies = (theta ** -(torch.arange(0, 8, 2) / 8)).to(torch.bfloat16)
    names = [f"model.layers.{i}.self_attn.rotary_emb.inv_freq" for i in range(2)]
    more = {name: frequencies.clone() for name in names}
    check_same(rewritten(target, lambda old: old | more), target.folder, *words)
