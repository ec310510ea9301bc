"""Properties of drafters that serving and weight updates rely on."""

import jax
import pytest

from specjax.config import SpeculativeConfig
from specjax.device.drafters.chain import ChainDrafter
from specjax.device.drafters.dflash import DFlashDrafter
from specjax.device.drafters.draft_model import DraftModel
from specjax.device.drafters.drafter import NoDrafter
from specjax.device.drafters.medusa import MedusaDrafter
from specjax.device.drafters.mtp import MTPHead
from specjax.device.drafters.ngram import NGramDrafter
from specjax.device.drafters.p_eagle import PEagleDrafter
from specjax.device.drafters.registry import DRAFTERS
from specjax.methods import METHODS
from specjax.rl.weights import brings_module, stage_drafter
from specjax.train.losses import drafter_loss
from specjax.train.target import demo_glm4_moe_lite, demo_qwen3_5


def test_every_method_can_be_loaded():
    assert set(DRAFTERS) == set(METHODS)


@pytest.mark.parametrize("method", METHODS)
def test_only_its_own_fields_go_with_a_method(method):
    """Only methods without a separate checkpoint may omit "model"."""
    fields = {"method": method, "num_speculative_tokens": 2}
    if METHODS[method].needs_model:
        with pytest.raises(ValueError, match="lacks \\['model'\\]"):
            SpeculativeConfig.of(fields)
    else:
        assert SpeculativeConfig.of(fields).model is None
    for other, needs in METHODS.items():
        for option in needs.options if other != method else ():
            with pytest.raises(ValueError, match=f"{option} goes with method='{other}'"):
                SpeculativeConfig(**fields, model="x", **{option: 1 if "prob" in option else 3})


def test_rows_that_drafting_adds_to_the_budget_of_a_step():
    """The numbers are vLLM's max_num_new_slots_for_drafting, which does not include Medusa."""
    table = {
        **dict.fromkeys(("eagle", "eagle3", "mtp"), (ChainDrafter, 0, 0, 0)),
        "dflash": (DFlashDrafter, 0, 0, 0),
        "p_eagle": (PEagleDrafter, 0, 0, 4),
        "draft_model": (DraftModel, 1, 1, 1),
        "medusa": (MedusaDrafter, 0, 0, 0),
    }
    for kind, *slots in table.values():
        assert [kind(None).draft_slots(k) for k in (0, 1, 5)] == slots
    assert [NGramDrafter().draft_slots(k) for k in (0, 1, 5)] == [0, 0, 0]
    assert {*table, "ngram", "suffix"} == set(METHODS)


@pytest.mark.parametrize("drafter", [NoDrafter(), NGramDrafter()])
def test_a_drafter_without_weights_takes_none(drafter):
    with pytest.raises(ValueError, match="no drafter with weights"):
        stage_drafter({"fc.weight": jax.numpy.zeros(1)}, drafter, None)
    assert not brings_module({"mtp.fc.weight": 0}, drafter)


def test_a_module_in_the_targets_files_is_told_by_its_names():
    own = ChainDrafter(MTPHead(demo_qwen3_5(48, 2, 64)))
    assert brings_module({"model.norm.weight": 0, "mtp.fc.weight": 0}, own)
    assert not brings_module({"model.norm.weight": 0}, own)
    assert own.weights.is_unused("model.norm.weight") and not own.weights.is_unused("mtp.x")


def test_a_module_caches_one_layer():
    assert MTPHead(demo_qwen3_5(48, 8, 64)).cache_kind.num_layers == 1


def test_a_head_for_latent_attention_is_as_wide_as_its_target():
    shape = demo_glm4_moe_lite(48, 2, 192).head_shape
    assert (shape.num_heads, shape.num_kv_heads, shape.head_dim) == (3, 1, 64)


def test_weights_of_an_unknown_kind_have_no_loss():
    class Parallel:
        pass

    with pytest.raises(ValueError, match="kind Parallel cannot be trained here; one of EagleHead"):
        drafter_loss(demo_qwen3_5(48, 2, 64), Parallel(), num_unrolled=1)
