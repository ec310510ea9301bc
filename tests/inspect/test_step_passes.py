"""How often a whole round of speculation passes over its logits, as compiled for an H200.

Batch 64, K = 3, 151,936 tokens: EAGLE drafts, verification and all between, on two layers.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from specjax.config import SpeculativeConfig
from specjax.device.cache.kind import CacheSizes
from specjax.device.drafters.chain import ChainDrafter
from specjax.device.drafters.drafter import Params, Variant
from specjax.device.drafters.eagle import EagleHead
from specjax.device.inputs import DecodeInputs, StepModel
from specjax.device.layout import Layout
from specjax.device.models.layers.rope import Rope
from specjax.device.models.llama import Llama
from specjax.device.models.model import init_caches
from specjax.device.state import init_state
from specjax.device.verification import make_verification
from specjax.engine.programs import Decode
from specjax.engine.tracing import Static, jitted

BATCH, K, VOCAB, PAGES, MAX_LEN = 64, 3, 151_936, 1024, 2048

pytestmark = pytest.mark.h200


def decode(dtype, verification="seed_exact", edits=False):
    """For compile.py: the engine's decode step, its shapes, and what is static in it."""
    target = Llama(
        vocab_size=VOCAB,
        hidden_size=1024,
        intermediate_size=3072,
        num_layers=2,
        num_heads=16,
        num_kv_heads=8,
        head_dim=128,
        rms_norm_eps=1e-6,
        rope=Rope(head_dim=128),
        max_position=4096,
        tie_word_embeddings=False,
        qk_norm=True,
    )
    drafter = ChainDrafter(EagleHead(shape=replace(target, num_layers=1, qk_norm=False)))
    config = SpeculativeConfig(
        method="eagle", model="", num_speculative_tokens=K, verification=verification
    )
    layout = Layout(BATCH, MAX_LEN, MAX_LEN // 16, VOCAB)

    def state():
        sizes = CacheSizes(BATCH, PAGES, 16, K + 1)
        caches, own = init_caches(target, sizes, dtype), drafter.init_state(sizes, dtype)
        return init_state(BATCH, MAX_LEN, VOCAB, caches, (None,), own)

    def shapes(specs):
        return jax.tree.map(lambda spec: jax.ShapeDtypeStruct(spec.shape, dtype), specs)

    params = Params(shapes(target.specs()), shapes(drafter.head.specs()))
    packed = jax.ShapeDtypeStruct(layout.packing(DecodeInputs).shape(BATCH), jnp.int32)
    model = StepModel(target, drafter, make_verification(config), "auto", 8, 1, "raw")
    round_ = jitted(Decode(BATCH, K, Variant()), Static(model, layout))
    return round_, (params, jax.eval_shape(state), packed), {}


DTYPES = "bfloat16", "float32"


@pytest.fixture(scope="module")
def reports(compile_for_h200):
    """All passes over logits of at least the drafts' size, by dtype."""
    requests = [
        {
            "function": "decode",
            "arguments": {"dtype": dtype},
            "passes_over": {"num_elements": BATCH * VOCAB, "columns": VOCAB},
        }
        for dtype in DTYPES
    ]
    return dict(zip(DTYPES, compile_for_h200(__file__, requests), strict=True))


@pytest.fixture(params=DTYPES)
def report(reports, request):
    return reports[request.param]


def of_rows(report, rows):
    """The passes of a greedy batch over logits of so many rows."""
    return [
        one
        for one in report["passes"]
        if all(branch == 0 for _, branch in one["branches"])
        and one["num_bytes"] >= 2 * rows * VOCAB
    ]


def test_a_greedy_round_writes_the_logits_once_and_reads_them_once(report):
    target = of_rows(report, BATCH * (K + 1))
    assert [one["access"] for one in target] == ["write", "read"], target


def test_so_does_each_draft(report):
    everything = of_rows(report, BATCH)
    assert len(everything) == 2 * (K + 1), everything
    assert report["num_passes"][0] == len(everything)


def test_the_state_is_updated_in_place(report):
    memory = report["memory"]
    assert memory["output"] - memory["alias"] < 2**20, memory  # all but the tokens
