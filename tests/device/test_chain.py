"""What a round without drafts asks of a chain drafter's head: keys and values, and no more."""

import math
from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
import pytest

from specjax.device.cache.kind import CacheSizes
from specjax.device.drafters.chain import ChainDrafter
from specjax.device.drafters.drafter import NoDrafter, Params, Variant
from specjax.device.drafters.eagle3 import Eagle3Head
from specjax.device.drafters.mtp import MTPHead
from specjax.device.inputs import DecodeInputs, StepModel
from specjax.device.models.layers.moe import Experts
from specjax.device.models.model import init_caches
from specjax.device.models.qwen3_5 import ATTENTION
from specjax.device.state import init_state
from specjax.device.step import decode_step
from specjax.device.verification import SeedExact
from specjax.train.target import demo_llama, demo_qwen3_5

BATCH, VOCAB, MAX_LEN, PAGES, PAGE_SIZE = 8, 64, 32, 16, 16
LLAMA = demo_llama(VOCAB, 2, 192)
DENSE = replace(demo_qwen3_5(VOCAB, 1, 192), layer_types=(ATTENTION,))
SPARSE = replace(DENSE, experts=Experts(4, 2, 128, 128, True))
HEADS = {
    "eagle3": (
        LLAMA,
        Eagle3Head(
            shape=replace(LLAMA, num_layers=1),
            target_hidden_size=192,
            draft_vocab_size=VOCAB,
            aux_layers=(0, 1, 2),
        ),
    ),
    "mtp-experts": (SPARSE, MTPHead(SPARSE)),
}


def num_flops(target, drafter, own):
    """Of a round of plain decoding beside `drafter`, whose weights are `own`.

    As it is lowered, without what nothing reads.
    """

    def state():
        sizes = CacheSizes(BATCH, PAGES, PAGE_SIZE, 1)
        caches = init_caches(target, sizes, jnp.float32)
        kept = drafter.init_state(sizes, jnp.float32)
        return init_state(BATCH, MAX_LEN, VOCAB, caches, (None,) * len(caches), kept)

    def shapes(specs):
        return jax.tree.map(lambda spec: jax.ShapeDtypeStruct(spec.shape, jnp.float32), specs)

    per_request = jax.ShapeDtypeStruct((BATCH,), jnp.int32)
    table = jax.ShapeDtypeStruct((BATCH, MAX_LEN // PAGE_SIZE), jnp.int32)
    inputs = DecodeInputs(per_request, per_request, per_request, table)
    model = StepModel(target, drafter, SeedExact(), "auto", 1, 1, "raw")
    run = jax.jit(partial(decode_step, model=model, variant=Variant(), k=0))
    params = Params(shapes(target.specs()), shapes(own))
    return run.lower(params, jax.eval_shape(state), inputs).cost_analysis()["flops"]


@dataclass(frozen=True)
class Watching(NoDrafter):
    """Drafts nothing, and has the target say what a head would look at."""

    aux_layers: tuple[int, ...] = ()


@pytest.mark.parametrize("kind", HEADS)
def test_a_round_without_drafts_runs_only_the_projections_of_the_head(kind):
    """Neither its attention nor its feed-forward layer: nothing reads what they make."""
    target, head = HEADS[kind]
    own = head.specs()
    plain = num_flops(target, Watching(head.aux_layers), None)
    speculating = num_flops(target, ChainDrafter(head), own)
    attention = own.layer.attention if kind.startswith("mtp") else own.attention
    projections = sum(math.prod(one.values.shape) for one in (own.fc, attention.qkv))
    assert 1 < (speculating - plain) / (2 * BATCH * projections) < 1.1
