"""EAGLE heads compared with torch: drafts and hidden states at every round of every request.

The oracle follows the published descriptions, and conftest.py runs the engine.
"""

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import numpy as np
import pytest
from support.marks import marked
from support.torch_heads import OracleHead, oracle_of

from specjax.config import SpeculativeConfig
from specjax.device.drafters.drafter import Params
from specjax.device.drafters.registry import load_drafter
from specjax.device.models.model import Features
from specjax.device.models.registry import load_model
from specjax.train.context import CausalRows

torch = pytest.importorskip("torch")

VOCAB, MASK = 24, 21  # few tokens, so that an untrained head is right now and then
TORCH_FILE = "pytorch_model.bin"
FLOAT32 = np.dtype(np.float32)

DEEP = "qwen3", {"num_hidden_layers": 3, "head_dim": 8}  # the default layers need three
SHALLOW = "qwen2", {"num_hidden_layers": 1, "tie_word_embeddings": True}
GEMMA = "gemma3_text", {"tie_word_embeddings": True}
GPT_OSS = "gpt_oss", {"num_hidden_layers": 3}
# What an EAGLE-3 head may have, and what that means to the oracle.
OPTIONS = {
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
    "eagle-3.1-not-normed": (
        {"architectures": ["LlamaForCausalLMEagle3"], "norm_output": False, "fc_norm": True},
        {"recycle_normed": False},
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
}
ALL = {
    "norm_before_residual": True,
    "draft_vocab": 15,
    "fc_norm": True,
    "input_norm": True,
    "embedding": "own",
    "hidden_size": 24,
    "head_dim": 10,
    "num_aux": 2,
}
OPTIONS["all"] = (
    {**ALL, "norm_output": True, "rope_theta": 5e2, "eagle_config": {"layer_ids": [3, 1]}},
    {"norm_before_residual": True, "recycle_normed": True, "aux_layers": (3, 1)},
)


class GreedyOracle(OracleHead):
    """The oracle for draft_sample_method="greedy": noise cannot change the best logit."""

    def logits(self, y):
        logits = super().logits(y)
        return torch.where(logits == logits.max(), 1e9, logits)


class OracleBlock(OracleHead):
    """A P-EAGLE head over all rows: the tokens' rows, then the mask rows."""

    keeps_last = False

    def drafts(self, fused, tokens, length, k, num_drafts, choose):
        ids = [*tokens[1 : length + 1], *[MASK] * (k - 1)]
        mask = self.fused(list(self.tensors["mask_hidden"].flatten().chunk(len(self.aux_layers))))
        hidden = torch.cat([fused[:length], mask.expand(max(k - 1, 0), -1)])
        x = self.run(self.embedding[torch.tensor(ids)], hidden)
        for i in range(1, self.decoder["num_hidden_layers"]):
            layer = f"layers.{i}"
            x = x + self.attend(self.norm(x, f"{layer}.input_layernorm"), layer)
            x = self.after_attention(x, layer)
        found, committed = [], tokens[: length + 1]
        for row in x[length - 1 : length - 1 + num_drafts]:
            found.append(choose(self.logits(row), [*committed, *found]))
        return found


# --- drafts of the engine -------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A head for a target (its model type and config fields), and options of the run."""

    method: str
    options: dict[str, Any]  # of the head's files
    oracle: dict[str, Any] = field(default_factory=dict)
    run: dict[str, Any] = field(default_factory=dict)
    target: tuple[str, dict[str, Any]] = DEEP


# Steps without drafts must still keep the head's cache true, in whatever slot it is.
NOW_AND_THEN = {"ks": (3, 0, 3, 0, 0, 0, 0)}
EDITS = {
    "repetition_penalty": 1.4,
    "frequency_penalty": 0.3,
    "presence_penalty": -0.2,
    "logit_bias": {3: 1.5, 8: -2.0},
    "top_k": 6,
    "top_p": 0.95,
}
CASES = {
    # A config that says nothing more.
    "eagle-plain-k-changes": Case("eagle", {}, {}, NOW_AND_THEN, SHALLOW),
    # All that EAGLE-1 may have of its own.
    "eagle-greedy-drafting-ignores-the-temperature": Case(
        "eagle",
        {
            "seed": 2,
            "embedding": "own",
            "fc_bias": True,
            "lm_head": True,
            "rope_theta": 5e2,
            "num_attention_heads": 2,
            "head_dim": 12,
            "rms_norm_eps": 0.1,
            "file": TORCH_FILE,
        },
        {"kind": GreedyOracle},
        {"draft_sample_method": "greedy"},
        SHALLOW,
    ),
    # Gemma's embeddings are scaled for the target alone.
    "eagle-of-a-target-with-other-layers": Case("eagle", {"embedding": "same"}, target=GEMMA),
    # Edited as the target will be, by what stands and the drafts before; over ids of the target,
    # though the head has fewer. Half of the requests ask for it.
    "eagle3-all-with-edits": Case("eagle3", *OPTIONS["all"], {"edits": EDITS}),
    # Many rounds without drafts never run the head through, but leave it all that it goes on from.
    # The target has layers of two kinds, with experts.
    "eagle3-after-many-rounds-without": Case(
        "eagle3",
        *OPTIONS["specforge-norm"],
        {"ks": (*[3] * 8, *[0] * 20), "least": 20},
        GPT_OSS,
    ),
    # As AWS publishes them; its norm is of no consequence, since nothing is recycled.
    "p_eagle-aws": Case(
        "p_eagle",
        {"pard_token": MASK, "norm_output": True, "embedding": "own"},
        {"kind": OracleBlock},
        NOW_AND_THEN | {"least": 20},
    ),
    # What a head may have besides.
    "p_eagle-all-speculators": Case(
        "p_eagle",
        {
            **ALL,
            "layout": "speculators",
            "mask_token_id": MASK,
            "num_layers": 2,
            "bias": True,
            "eagle_aux_hidden_state_layer_ids": [3, 1],
        },
        {"kind": OracleBlock, "norm_before_residual": True, "aux_layers": (3, 1)},
        {"ks": (3, 1), "least": 20},
    ),
}


def made(checkpoints, method, target, options, of_oracle):
    """Return the files and the oracle of a head. By default, the head reads the default layers."""
    files = getattr(checkpoints, method)(target, **options)
    layers = () if method == "eagle" else (2, 1, 0)
    return files, oracle_of(target, files, **{"aux_layers": layers} | of_oracle)


SLOW = "eagle3-all-with-edits", "p_eagle-aws", "eagle3-after-many-rounds-without"


@pytest.mark.slow
@pytest.mark.parametrize("name", marked(CASES, fast=["eagle-plain-k-changes"], slow=SLOW))
def test_drafts(checkpoints, check_drafts, name):
    case = CASES[name]
    kind, config = case.target
    target = checkpoints.target(kind, vocab_size=VOCAB, **config)
    files, oracle = made(checkpoints, case.method, target, case.options, case.oracle)
    drafter, engine, _ = check_drafts(target, files.folder, case.method, oracle, **case.run)
    has_own = case.options.get("embedding") == "own"
    assert drafter.head.has_embedding == has_own
    assert (engine.params.drafter.embedding is not None) == has_own


# --- every part of EAGLE-3 by itself --------------------------------------------------------------


def load(target, files, **speculative):
    """Load the drafter and the parameters from a head's files."""
    model, _ = load_model(target.folder, FLOAT32)
    config = SpeculativeConfig(method="eagle3", model="", num_speculative_tokens=3, **speculative)
    return load_drafter(files.folder, config, model, FLOAT32)


@partial(jax.jit, static_argnums=(0, 1))
def run_head(head, target, params, tokens, final, states):
    """Return a head's recycled hidden states and logits, over whole sequences without a cache."""
    hidden = head.fuse(params.drafter, Features(final, states))
    rows = CausalRows.of(1, len(tokens))
    y, _ = head.extend(target, params, tokens, hidden, rows, None)
    return y, head.logits(target, params, y)


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n in OPTIONS if n not in ("specforge-norm", "all")])
def test_every_part_of_eagle3_by_itself(checkpoints, name):
    """Heads with a single optional part run over all rows. Tests above use none or all parts."""
    kind, config = DEEP
    target = checkpoints.target(kind, vocab_size=VOCAB, **config)
    files, oracle = made(checkpoints, "eagle3", target, *OPTIONS[name])
    drafter, head_params = load(target, files)
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


def test_eagle3_default_layers(checkpoints):
    deep = checkpoints.target("llama", vocab_size=VOCAB, num_hidden_layers=7)
    drafter, _ = load(deep, checkpoints.eagle3(deep))
    assert drafter.aux_layers == (2, 3, 4)


def test_eagle3_layers_numbered_by_output(checkpoints):
    """The output of layer i is the input of layer i + 1. Nothing else of the head differs."""
    kind, config = DEEP
    target = checkpoints.target(kind, vocab_size=VOCAB, **config)
    by_output = checkpoints.eagle3(target, eagle_aux_hidden_state_layer_ids=[0, 1, 2])
    drafter, params = load(target, by_output, aux_id_convention="output")
    entering = checkpoints.eagle3(target, eagle_aux_hidden_state_layer_ids=[1, 2, 3])
    expected, its_params = load(target, entering)
    assert drafter.aux_layers == (1, 2, 3) and drafter == expected
    jax.tree.map(np.testing.assert_array_equal, params, its_params)
