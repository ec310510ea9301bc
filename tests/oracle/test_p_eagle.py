"""P-EAGLE heads against torch, without a cache; conftest.py has how it is run. Every draft is
compared: what its mask stands for, where it stands, and what it attends to.
"""

from dataclasses import dataclass

import jax
import numpy as np
import pytest
from support.torch_heads import OracleHead, oracle_of

from specjax import LLM
from specjax.checkpoint.errors import CheckpointError
from specjax.config import SpeculativeConfig
from specjax.device.drafters.registry import load_drafter
from specjax.device.models.registry import load_model
from specjax.rl.weights import stage_drafter

torch = pytest.importorskip("torch")

VOCAB, MASK = 24, 21
FLOAT32 = np.dtype(np.float32)


@dataclass(frozen=True)
class OracleBlock(OracleHead):
    """A P-EAGLE head over all rows: those of tokens, then the masks."""

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


@pytest.fixture(scope="module")
def target(checkpoints):
    return checkpoints.target("qwen3", vocab_size=VOCAB, num_hidden_layers=3, head_dim=8)


@pytest.mark.parametrize(
    "options, norm_before_residual, ks",
    [
        # As AWS publishes them; its norm is of no consequence, since nothing is recycled.
        (
            {"pard_token": MASK, "norm_output": True, "embedding": "own"},
            False,
            (3, 0, 3, 0, 0, 0, 0),
        ),
        # What a head may have besides.
        pytest.param(
            {
                "layout": "speculators",
                "mask_token_id": MASK,
                "norm_before_residual": True,
                "num_layers": 2,
                "draft_vocab": 15,
                "embedding": "own",
                "bias": True,
                "fc_norm": True,
                "input_norm": True,
                "hidden_size": 24,
                "head_dim": 10,
                "num_aux": 2,
                "eagle_aux_hidden_state_layer_ids": [3, 1],
            },
            True,
            (3, 1, 2),
            marks=pytest.mark.slow,
        ),
        # One layer, and speculators' defaults: no norm before the residual, unlike EAGLE-3's.
        pytest.param(
            {"layout": "speculators", "ptd_token_id": MASK, "num_layers": 1},
            False,
            (2,),
            marks=pytest.mark.slow,
        ),
    ],
    ids=["aws", "all-speculators", "one-layer"],
)
def test_p_eagle_drafts(checkpoints, target, check_drafts, options, norm_before_residual, ks):
    files = checkpoints.p_eagle(target, **options)
    decoder = files.config.get("transformer_layer_config", files.config)
    oracle = oracle_of(
        target,
        files,
        kind=OracleBlock,
        aux_layers=tuple(options.get("eagle_aux_hidden_state_layer_ids", (2, 1, 0))),
        norm_before_residual=norm_before_residual,
    )
    oracle = OracleBlock(**vars(oracle) | {"decoder": decoder})
    check_drafts(target, files, "p_eagle", oracle, ks=ks, least=20)


def test_weights_are_updated_under_their_published_names(checkpoints, target):
    files = checkpoints.p_eagle(target, pard_token=MASK)
    model, _ = load_model(target.folder, FLOAT32)
    config = SpeculativeConfig(method="p_eagle", model="", num_speculative_tokens=2)
    drafter, params = load_drafter(files.folder, config, model, FLOAT32)
    sources = stage_drafter({name: x.numpy() for name, x in files.tensors.items()}, drafter, params)
    assert len(sources) == len(jax.tree.leaves(params))


def refused(target, folder, method="p_eagle"):
    speculation = {"method": method, "model": str(folder), "num_speculative_tokens": 3}
    with pytest.raises(CheckpointError) as error:
        LLM(target.folder, speculative_config=speculation, verbose=False)
    return str(error.value)


def test_heads_that_do_not_fit_are_refused(checkpoints, target):
    eagle3 = checkpoints.eagle3(target).folder
    message = refused(target, eagle3)
    assert "no tensor mask_hidden" in message and "use method 'eagle3'" in message
    head = checkpoints.p_eagle(target, pard_token=MASK).folder
    assert "method 'p_eagle'" in refused(target, head, "eagle3")
    for edit, message in {
        "pard_token": (VOCAB, "pard_token=24 must be one of the target's 24 tokens; set it"),
        "vocab_size": (30, "vocab_size=30 differs from the target's 24"),
        "norm_before_residual": ("yes", "norm_before_residual must be true or false"),
        "hidden_size": (40, "40 wide and uses the target's embedding"),
    }.items():
        value, text = message
        assert text in refused(target, checkpoints.copy(head, **{edit: value}))
    nameless = checkpoints.copy(head, pard_token=None)
    assert "mask_token_id=None must be one of" in refused(target, nameless)
