"""Padding, and the split of a step into programs, change no token and no count."""

import math
from dataclasses import dataclass, field, replace

import jax
import numpy as np
import pytest
from support.configs import described
from support.engines import programs_with

from pallas_kernels.page_formats import FP8, INT8
from specjax.config import EngineConfig, SpeculativeConfig
from specjax.device import sampling
from specjax.device.cache.kind import CacheSizes
from specjax.device.cache.rows import padded_width
from specjax.device.drafters.chain import ChainDrafter
from specjax.device.drafters.drafter import Params, Variant
from specjax.device.drafters.eagle3 import Eagle3Head
from specjax.device.drafters.mtp import MTPHead
from specjax.device.drafters.ngram import NGramDrafter
from specjax.device.drafters.registry import load_drafter, shape_drafter
from specjax.device.layout import Layout
from specjax.device.models.layers.moe import Experts
from specjax.device.models.model import init_caches
from specjax.device.models.qwen3_5 import ATTENTION
from specjax.device.models.registry import load_model
from specjax.device.state import init_state
from specjax.device.verification import SeedExact
from specjax.engine.engine import Engine
from specjax.engine.programs import Begin, Decode, Joined, Prefill
from specjax.engine.step_model import empty_state, step_model
from specjax.engine.tracing import Static, jitted
from specjax.host.request import Request
from specjax.host.speculation.policy import StaticPolicy
from specjax.sampling_params import SamplingParams
from specjax.train.target import demo_llama, demo_qwen3_5

pytestmark = pytest.mark.slow

FLOAT32 = np.dtype(np.float32)
VOCAB, MAX_LEN, K = 24, 64, 2
TEMPERATURES = (0.0, 0.7, 0.0)


@pytest.fixture(scope="module")
def serve(checkpoints):
    """Return a function that serves a few requests, with rows padded to a multiple.

    It returns the outputs, the counts of accepted drafts, and bool[slots]: which slots are active
    at the end.
    """
    target = checkpoints.target("llama", vocab_size=VOCAB, num_hidden_layers=1)
    model, params = load_model(target.folder, FLOAT32)
    folder = checkpoints.eagle3(target, num_aux=2).folder
    config = SpeculativeConfig(method="eagle3", model=str(folder), num_speculative_tokens=K)
    drafter, head_params = load_drafter(folder, config, model, FLOAT32)
    rng = np.random.default_rng(0)
    prompts = [tuple(rng.integers(0, VOCAB, length).tolist()) for length in (5, 40, 17)]

    def serve(row_multiple=1, **asks):
        def make_model(*arguments):
            return step_model(*arguments)._replace(row_multiple=row_multiple)

        config = EngineConfig(
            max_model_len=MAX_LEN,
            max_num_seqs=2,
            max_num_batched_tokens=32,
            decode_batches=(2,),
            prefill_shapes=((2, 16),),
            num_pages=12,
        )
        programs, both = programs_with(make_model=make_model), Params(params, head_params)
        engine = Engine(config, model, drafter, both, StaticPolicy(K), make_programs=programs)
        for i, (prompt, temperature) in enumerate(zip(prompts, (0.0, 0.7, 0.0), strict=True)):
            asked = SamplingParams(temperature=temperature, **asks)
            engine.add(Request(i, prompt, asked, 20, (i,)))
        outputs = {}
        while engine.has_work:
            done = [sequence for sequence in engine.step() if sequence.is_finished]
            outputs |= {one.request.request_id: one.output for one in done}
            assert all(sequence.finish_reason == "length" for sequence in done)
        accepted = engine.metrics().num_accepted_tokens_per_pos
        return outputs, accepted, np.asarray(engine.programs.state.is_active)

    return serve


def test_padded_rows_change_nothing_and_the_device_ends_requests_by_itself(serve):
    outputs, accepted, is_active = serve()
    assert serve(row_multiple=8)[:2] == (outputs, accepted)
    assert sum(accepted) > 0 and len(outputs) == 3 and not is_active.any()


def test_drafts_follow_what_requests_ask_of_logits(serve):
    """With logit_bias, one token is certain. All drafts are right if they apply the bias, too."""
    outputs, accepted, _ = serve(logit_bias={7: 100.0})
    assert all(set(output) == {7} for output in outputs.values())
    whole_rounds = 19 // (K + 1)  # of 20 tokens, the first comes with the prompt
    assert min(accepted) >= len(outputs) * whole_rounds


def test_padded_width_is_the_least_that_fits():
    for batch in 1, 2, 3, 5, 6, 8, 16:
        for width in 1, 2, 4, 6:
            padded = padded_width(batch, width, 8)
            assert padded >= width and batch * padded % 8 == 0
            assert all(batch * w % 8 for w in range(width, padded))
            assert padded_width(batch, width, 1) == width


def abstract(config, target, drafter, program):
    """Return an engine's program without deferred rounds, and shapes of its state and arguments."""
    model = step_model(config, target, drafter, SeedExact(), "cpu")._replace(max_deferred_rows=0)
    layout = Layout.of(config, target.vocab_size, model.windows)
    shapes = [layout.packing(kind).shape(batch) for kind, batch in program.packed]
    packed = [jax.ShapeDtypeStruct(shape, "int32") for shape in shapes]
    state = jax.eval_shape(lambda: empty_state(config, model, K))
    return jitted(program, Static(model, layout)), state, packed


def abstract_weights(specs):
    return jax.tree.map(lambda spec: jax.ShapeDtypeStruct(spec.shape, "float32"), specs)


@dataclass(frozen=True)
class Watching(NGramDrafter):
    """A drafter by prompt lookup that records the rows it observes. It may ask for features."""

    shown: list = field(default_factory=list)
    aux_layers: tuple[int, ...] = ()

    def observe(self, target, params, state, seen):
        self.shown.append(seen.rows)
        return state


def test_drafters_do_not_see_the_pages_of_the_targets_windows():
    """A drafter's pages are never freed early, so its layers never use the target's window tables.

    This holds after a round and after a chunk, even for a layer with the same window.
    """
    target, drafter = described("mistral", sliding_window=8, num_hidden_layers=1), Watching()
    config = EngineConfig(max_model_len=MAX_LEN, max_num_seqs=2, page_size=8, num_pages=16)
    joined = Joined(Begin(1, 4, Variant()), Decode(2, K, Variant()))
    step, state, packed = abstract(config, target, drafter, joined)
    jax.eval_shape(step, Params(abstract_weights(target.specs()), None), state, *packed)
    assert [rows.width for rows in drafter.shown] == [K + 1, 4]
    for rows in drafter.shown:
        assert rows.table(8) is rows.page_table


LLAMA = demo_llama(64, 2, 192)
DENSE = replace(demo_qwen3_5(64, 1, 192), layer_types=(ATTENTION,))
SPARSE = replace(DENSE, experts=Experts(4, 2, 128, 128, True))
HEADS = {
    "eagle3": (
        LLAMA,
        Eagle3Head(
            shape=replace(LLAMA, num_layers=1),
            target_hidden_size=192,
            draft_vocab_size=64,
            aux_layers=(0, 1, 2),
        ),
    ),
    "mtp-experts": (SPARSE, MTPHead(SPARSE)),
}


@pytest.mark.parametrize("kind", HEADS)
def test_a_round_without_drafts_runs_only_the_projections_of_the_head(kind):
    """The head's attention and feed-forward layers are skipped: nothing reads their results.

    Operations are counted before optimisation, and compared with a drafter that has no weights but
    reads the same hidden states.
    """
    (target, head), batch = HEADS[kind], 8
    own = head.specs()
    config = EngineConfig(
        max_model_len=32, max_num_seqs=batch, page_size=16, num_pages=16, dtype="float32"
    )

    def num_flops(drafter, own):
        step, state, packed = abstract(config, target, drafter, Decode(batch, 0, Variant()))
        params = Params(abstract_weights(target.specs()), abstract_weights(own))
        return step.lower(params, state, *packed).cost_analysis()["flops"]

    more = num_flops(ChainDrafter(head), own) - num_flops(
        Watching(aux_layers=head.aux_layers), None
    )
    attention = own.layer.attention if kind.startswith("mtp") else own.attention
    projections = sum(math.prod(one.values.shape) for one in (own.fc, attention.qkv))
    assert 1 < more / (2 * batch * projections) < 1.1


def test_edits_are_traced_once_for_all_drafts_and_not_in_plain_rounds(monkeypatch):
    (target, head), batch = HEADS["eagle3"], 7  # a size that no other test has traced
    traced, config = [], EngineConfig(max_model_len=32, max_num_seqs=batch, num_pages=16)

    def edit(logits, *others):
        traced.append(logits.shape[:2])
        return logits

    monkeypatch.setattr(sampling, "edit", edit)
    params = Params(abstract_weights(target.specs()), abstract_weights(head.specs()))
    for variant, expected in (Variant(is_plain=True), []), (Variant(), [(7, 1), (7, K + 1)]):
        program = Decode(batch, K, variant)
        step, state, packed = abstract(config, target, ChainDrafter(head), program)
        jax.eval_shape(step, params, state, *packed)
        assert sorted(traced) == expected


@pytest.mark.parametrize("name", ["llama", "deepseek_v3", "qwen3_5_text"])
@pytest.mark.parametrize("stored", [FP8, INT8], ids=["fp8", "int8"])
def test_steps_keep_the_dtype_of_pages(checkpoints, name, stored):
    """If pages have a separate dtype, all pools have it, and no other array does."""
    model, params = load_model(checkpoints.target(name).folder, FLOAT32)
    drafter, own = shape_drafter("eagle", model, name, "float32")
    config = EngineConfig(max_model_len=32, max_num_seqs=2, page_size=8, num_pages=13)
    sizes = CacheSizes(2, 13, 8, K + 1, 2, page_format=stored)

    def empty():
        caches = init_caches(model, sizes, "float32")
        snapshots = tuple(kind.init_snapshots(2, "float32") for kind in model.cache_kinds)
        of_drafter = drafter.init_state(sizes, "float32")
        return init_state(2, 32, model.vocab_size, caches, snapshots, of_drafter)

    state, num_pools = jax.eval_shape(empty), 0
    for leaf in jax.tree.leaves((state.caches, state.drafter)):
        is_pool = leaf.shape[1:3] == (13, 8) and leaf.dtype.itemsize == 1
        assert str(leaf.dtype) == (stored.dtype if is_pool else "float32"), leaf
        num_pools += is_pool
    assert num_pools == 2
    for program in Prefill(1, 16), Decode(2, K, Variant()), Decode(2, 0, Variant()):
        step, _, packed = abstract(config, model, drafter, program)
        after, _ = jax.eval_shape(step, Params(params, own), state, *packed)
        assert jax.tree.map(lambda x: (x.shape, x.dtype), after) == jax.tree.map(
            lambda x: (x.shape, x.dtype), state
        )
