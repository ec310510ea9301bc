"""EAGLE heads against torch: each draft and hidden state, at every round of every request.

The oracle is written from the published description; conftest.py has how it is run.
"""

from functools import partial

import jax
import numpy as np
import pytest
from support.torch_heads import OracleHead, oracle_of

from specjax.config import SpeculativeConfig
from specjax.device.drafters.drafter import Params
from specjax.device.drafters.registry import load_drafter
from specjax.device.models.model import Features
from specjax.device.models.registry import load_model
from specjax.train.context import CausalRows

torch = pytest.importorskip("torch")

VOCAB = 24  # small, so that an untrained head is right now and then
TORCH_FILE = "pytorch_model.bin"
FLOAT32 = np.dtype(np.float32)


@pytest.fixture(scope="module")
def target(checkpoints):
    """Of EAGLE-3, whose default layers need three."""
    return checkpoints.target("qwen3", vocab_size=VOCAB, num_hidden_layers=3, head_dim=8)


@pytest.fixture(scope="module")
def shallow_target(checkpoints):
    """Of EAGLE-1, which reads the end of a target alone."""
    return checkpoints.target(
        "qwen2", vocab_size=VOCAB, num_hidden_layers=1, tie_word_embeddings=True
    )


# --- EAGLE-1 --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options, keeps_embedding, ks",
    [
        # A config that says nothing more.
        ({}, False, (3, 0, 3, 0, 0, 0, 0)),
        # What the config says of a bias is not there, and the embedding is the target's.
        ({"embedding": "same", "bias": True}, False, (3,)),
    ],
    ids=["plain-k-changes", "copied-embedding-no-bias"],
)
def test_eagle1_drafts(checkpoints, check_drafts, shallow_target, options, keeps_embedding, ks):
    files = checkpoints.eagle(shallow_target, **options)
    oracle = oracle_of(shallow_target, files)
    drafter, engine = check_drafts(shallow_target, files, "eagle", oracle, ks=ks)
    assert drafter.head.has_embedding == keeps_embedding
    assert (engine.params.drafter.embedding is not None) == keeps_embedding


@pytest.mark.slow
def test_a_plain_head_of_a_target_with_other_layers(checkpoints, check_drafts):
    """Gemma's embeddings are scaled for the target alone."""
    target = checkpoints.target("gemma3_text", vocab_size=VOCAB, tie_word_embeddings=True)
    files = checkpoints.eagle(target, embedding="same")
    drafter, _ = check_drafts(target, files, "eagle", oracle_of(target, files))
    assert not drafter.head.has_embedding


def test_greedy_drafting_ignores_the_temperature(checkpoints, check_drafts, shallow_target):
    """Here by a head with all that EAGLE-1 may have of its own."""
    files = checkpoints.eagle(
        shallow_target,
        seed=2,
        embedding="own",
        fc_bias=True,
        lm_head=True,
        rope_theta=5e2,
        num_attention_heads=2,
        head_dim=12,
        rms_norm_eps=0.1,
        file=TORCH_FILE,
    )
    greedy = GreedyOracle(**vars(oracle_of(shallow_target, files)))
    drafter, engine = check_drafts(
        shallow_target, files, "eagle", greedy, draft_sample_method="greedy"
    )
    assert drafter.head.has_embedding and engine.params.drafter.embedding is not None


class GreedyOracle(OracleHead):
    """The oracle under draft_sample_method="greedy": noise cannot outweigh its logits."""

    def logits(self, y):
        logits = super().logits(y)
        return torch.where(logits == logits.max(), 1e9, logits)


# --- EAGLE-3 --------------------------------------------------------------------------------------


def loaded(target, files, **speculative):
    """The drafter and parameters of a head's files."""
    model, _ = load_model(target.folder, FLOAT32)
    config = SpeculativeConfig(
        method="eagle3", model=str(files.folder), num_speculative_tokens=3, **speculative
    )
    return load_drafter(files.folder, config, model, FLOAT32)


def test_eagle3_default_layers(checkpoints):
    deep = checkpoints.target("llama", vocab_size=VOCAB, num_hidden_layers=7)
    drafter, _ = loaded(deep, checkpoints.eagle3(deep))
    assert drafter.aux_layers == (2, 3, 4)


# What an EAGLE-3 head may have, and what that means to the oracle.
OPTIONS = {
    "plain": ({}, {}),
    "norm-before-residual-d2t": (
        {"norm_before_residual": True, "draft_vocab": 15, "file": TORCH_FILE},
        {"norm_before_residual": True},
    ),
    "recycled-norm-input-norm": (
        {"norm_output": True, "input_norm": True, "norm_before_fc": True, "rope_theta": 5e2},
        {"recycle_normed": True},
    ),
    "eagle-3.1-five-layers": (
        {
            "architectures": ["LlamaForCausalLMEagle3"],
            "norm_output": True,
            "fc_norm": True,
            "num_aux": 5,
            "eagle_aux_hidden_state_layer_ids": [1, 3, 0, 2, 3],
        },
        {"recycle_normed": True, "aux_layers": (1, 3, 0, 2, 3)},
    ),
    "eight-layers-fc-bias": (
        {
            "architectures": ["LlamaForCausalLMEagle3"],
            "norm_output": False,
            "fc_bias": True,
            "num_aux": 8,
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2, 3, 3, 2, 1, 0]},
        },
        {"aux_layers": (0, 1, 2, 3, 3, 2, 1, 0)},
    ),
    # As the head of gpt-oss-120b for short contexts, and with the target's output head.
    "no-layers-the-targets-head": (
        {"num_aux": 0, "lm_head": False, "eagle_config": {"use_aux_hidden_state": False}},
        {"aux_layers": ()},
    ),
    # SpecForge's norm_output is another.
    "specforge-norm": (
        {"architectures": ["LlamaForCausalLMEagle3"], "norm_output": True},
        {"recycle_normed": False},
    ),
    "own-width-nested-layers": (
        {
            "embedding": "own",
            "hidden_size": 24,
            "head_dim": 10,
            "num_aux": 2,
            "eagle_config": {"layer_ids": [3, 1]},
        },
        {"aux_layers": (3, 1)},
    ),
    "all": (
        {
            "norm_before_residual": True,
            "draft_vocab": 15,
            "norm_output": True,
            "input_norm": True,
            "fc_norm": True,
            "rope_theta": 5e2,
            "embedding": "own",
            "hidden_size": 24,
            "head_dim": 10,
            "num_aux": 2,
            "eagle_config": {"layer_ids": [3, 1]},
            "file": TORCH_FILE,
        },
        {"norm_before_residual": True, "recycle_normed": True, "aux_layers": (3, 1)},
    ),
}


def eagle3_of(checkpoints, target, name):
    """(files, oracle) of a head; one without explicit layers reads the default ones."""
    options, oracle_options = OPTIONS[name]
    files = checkpoints.eagle3(target, **options)
    return files, oracle_of(target, files, **({"aux_layers": (2, 1, 0)} | oracle_options))


@partial(jax.jit, static_argnums=(0, 1))
def run_head(head, target, params, tokens, final, states):
    """(what is recycled, logits) of a head's rows: no cache, whole sequences."""
    hidden = head.fuse(params.drafter, Features(final, states))
    rows = CausalRows.of(1, len(tokens))
    y, _ = head.extend(target, params, tokens, hidden, rows, None)
    return y, head.logits(target, params, y)


@pytest.mark.parametrize(
    "name",
    [
        "norm-before-residual-d2t",
        "recycled-norm-input-norm",
        "eagle-3.1-five-layers",
        "eight-layers-fc-bias",
        "no-layers-the-targets-head",
        "own-width-nested-layers",
    ],
)
def test_every_part_of_eagle3_by_itself(checkpoints, target, name):
    """Over all rows at once; the drafts below are of heads that have none of them, and all."""
    files, oracle = eagle3_of(checkpoints, target, name)
    drafter, head_params = loaded(target, files)
    assert drafter.aux_layers == oracle.aux_layers
    model, params = load_model(target.folder, FLOAT32)
    tokens = np.random.default_rng(0).integers(0, VOCAB, 20)
    generator = torch.Generator().manual_seed(0)
    final, *entering = (torch.randn(20, model.hidden_size, generator=generator) for _ in range(5))
    y = oracle.run(oracle.embedding[tokens], oracle.fuse(final, entering))
    states = torch.cat([entering[i] for i in oracle.aux_layers] or [final], -1).numpy()
    both = Params(params, head_params)
    found, logits = run_head(drafter.head, model, both, tokens, final.numpy(), states)
    np.testing.assert_allclose(found, oracle.recycled(y), rtol=0, atol=1e-4)
    ids = head_params.target_ids
    expected = torch.stack([oracle.logits(row) for row in y])
    expected = expected[:, slice(None) if ids is None else np.array(ids)]
    np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    "name", ["all", pytest.param("no-layers-the-targets-head", marks=pytest.mark.slow)]
)
def test_eagle3_drafts(checkpoints, check_drafts, target, name):
    files, oracle = eagle3_of(checkpoints, target, name)
    check_drafts(target, files, "eagle3", oracle)


@pytest.mark.slow
def test_eagle3_drafts_for_layers_of_two_kinds_with_experts(checkpoints, check_drafts):
    target = checkpoints.target("gpt_oss", vocab_size=VOCAB, num_hidden_layers=3)
    files, oracle = eagle3_of(checkpoints, target, "plain")
    check_drafts(target, files, "eagle3", oracle)


def test_drafts_are_edited_as_the_target_will_be(checkpoints, check_drafts, target):
    """By what stands and the drafts before; over ids of the target, though the head has fewer."""
    files, oracle = eagle3_of(checkpoints, target, "all")
    edits = {
        "repetition_penalty": 1.4,
        "frequency_penalty": 0.3,
        "presence_penalty": -0.2,
        "logit_bias": {3: 1.5, 8: -2.0},
        "top_k": 6,
        "top_p": 0.95,
    }
    check_drafts(target, files, "eagle3", oracle, edits=edits)


@pytest.mark.parametrize("norm_before_residual", [None, False])
def test_speculators_layout_gives_the_same_head(checkpoints, target, norm_before_residual):
    """As the raw one, whose drafts are checked above; it norms before the residual by default."""
    options = {"draft_vocab": 15, "rope_theta": 5e2, "rms_norm_eps": 0.1, "num_attention_heads": 2}
    says = {} if norm_before_residual is None else {"norm_before_residual": norm_before_residual}
    drafter, params = loaded(
        target, checkpoints.eagle3(target, layout="speculators", **options, **says)
    )
    raw = checkpoints.eagle3(target, **options, norm_before_residual=norm_before_residual is None)
    expected, its_params = loaded(target, raw)
    assert expected.head.norm_before_residual == (norm_before_residual is None)
    assert drafter == expected
    jax.tree.map(np.testing.assert_array_equal, params, its_params)


def test_eagle3_layers_numbered_by_output(checkpoints, target):
    """An output i enters layer i + 1; nothing else of the head knows of it."""
    by_output = checkpoints.eagle3(target, eagle_aux_hidden_state_layer_ids=[0, 1, 2])
    drafter, params = loaded(target, by_output, aux_id_convention="output")
    entering = checkpoints.eagle3(target, eagle_aux_hidden_state_layer_ids=[1, 2, 3])
    expected, its_params = loaded(target, entering)
    assert drafter.aux_layers == (1, 2, 3) and drafter == expected
    jax.tree.map(np.testing.assert_array_equal, params, its_params)


# --- the cache of the head, kept in step ----------------------------------------------------------


@pytest.mark.parametrize(
    "name, ks, least",
    [
        ("plain", (3, 0), 40),
        # Those rounds never run the head through, but leave it all that it goes on from.
        ("specforge-norm", (*[3] * 8, *[0] * 20), 20),
    ],
    ids=["every-step", "after-many-rounds-without"],
)
def test_drafts_stay_true_when_k_changes_and_slots_change_hands(
    checkpoints, check_drafts, target, name, ks, least
):
    """Steps without drafts must still keep the head's cache true, in whatever slot it is."""
    files, oracle = eagle3_of(checkpoints, target, name)
    check_drafts(target, files, "eagle3", oracle, ks=ks, least=least)
