"""The conversion between plans and arrays: nothing is lost, and the host's arrays are its own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax.engine
from specjax.batch import pack, pack_outputs, packed_shape, unpack_outputs, unpack_prefill
from specjax.config import EngineConfig
from specjax.device.drafters.drafter import NoDrafter, Params
from specjax.device.models.layers.rope import Rope
from specjax.device.models.llama import Llama
from specjax.device.step import DecodeInputs, PrefillInputs, StepOutputs
from specjax.engine import Engine
from specjax.host.scheduler import Chunk, DecodePlan, PrefillPlan, Sequence
from specjax.host.speculation.policy import StaticPolicy
from specjax.request import MAX_SEED, MAX_STOP_IDS, Request

NUM_SLOTS, PAGES_PER_SEQ, WIDTH = 9, 6, 8


def make_sequence(slot, prompt_length, *, temperature=0.0, seed=0, stop_ids=(), num_pages=2):
    request = Request(
        100 + slot, tuple(range(slot, slot + prompt_length)), 5, temperature, seed, stop_ids
    )
    return Sequence(request, slot, [10 * slot + page for page in range(num_pages)])


CHUNKS = (
    Chunk(make_sequence(4, 8, temperature=0.7, seed=MAX_SEED, stop_ids=(3, 1)), 0, 8),
    Chunk(make_sequence(0, 20, temperature=1e-30, seed=2**31, num_pages=PAGES_PER_SEQ), 8, 8),
    Chunk(make_sequence(8, 3, stop_ids=tuple(range(MAX_STOP_IDS)), num_pages=0), 2, 1),
)
PREFILL = PrefillPlan(CHUNKS, 5, WIDTH)
DECODE = DecodePlan(tuple(chunk.sequence for chunk in CHUNKS), 4, 2)


def padded(values, length):
    return [*values, *[-1] * (length - len(values))]


def test_prefill_round_trip():
    packed = pack(PREFILL, NUM_SLOTS, PAGES_PER_SEQ)
    assert packed.dtype == np.int32 and packed.shape == packed_shape(PREFILL, PAGES_PER_SEQ)
    inputs = jax.jit(unpack_prefill, static_argnums=1)(packed, WIDTH)
    for row, chunk in enumerate(CHUNKS):
        sequence, request = chunk.sequence, chunk.sequence.request
        end = chunk.start + chunk.count
        tokens = request.prompt_token_ids
        assert inputs.slots[row] == sequence.slot
        assert inputs.starts[row] == chunk.start
        assert inputs.counts[row] == chunk.count
        assert inputs.tokens[row, : chunk.count].tolist() == list(tokens[chunk.start : end])
        assert inputs.next_tokens[row] == (tokens[end] if end < len(tokens) else -1)
        assert inputs.limits[row] == request.max_length
        assert inputs.page_table[row].tolist() == padded(sequence.pages, PAGES_PER_SEQ)
        assert inputs.stop_ids[row].tolist() == padded(request.stop_ids, MAX_STOP_IDS)
        assert inputs.sampling.temperature[row] == np.float32(request.temperature)
        assert int(inputs.sampling.seeds[row]) == request.seed
    assert inputs.sampling.temperature.dtype == jnp.float32
    assert inputs.sampling.seeds.dtype == jnp.uint32
    assert {leaf.shape[0] for leaf in jax.tree.leaves(inputs)} == {PREFILL.batch}


def test_prefill_padding_does_nothing():
    inputs = unpack_prefill(jnp.array(pack(PREFILL, NUM_SLOTS, PAGES_PER_SEQ)), WIDTH)
    padding = slice(len(CHUNKS), None)
    assert (inputs.slots[padding] == NUM_SLOTS).all()
    assert (inputs.counts[padding] == 0).all()
    assert (inputs.page_table[padding] == -1).all()
    assert (inputs.tokens >= 0).all(), "an id of -1 would embed the vocabulary's last token"


def test_decode_rows_are_slot_and_pages():
    packed = pack(DECODE, NUM_SLOTS, PAGES_PER_SEQ)
    assert packed.shape == packed_shape(DECODE, PAGES_PER_SEQ)
    expected = [[s.slot, *padded(s.pages, PAGES_PER_SEQ)] for s in DECODE.sequences]
    np.testing.assert_array_equal(packed, [*expected, [NUM_SLOTS, *[-1] * PAGES_PER_SEQ]])


def test_outputs_round_trip():
    outputs = StepOutputs(
        tokens=jnp.array([[5, 6, 7], [8, 9, 9], [4, 4, 4], [1, 1, 1]]),
        num_tokens=jnp.array([3, 1, 0, 2]),
    )
    packed = np.asarray(pack_outputs(outputs))
    assert unpack_outputs(packed, DECODE) == [[5, 6, 7], [8], []]
    assert unpack_outputs(packed[:, :2], PREFILL) == [[5], [8], []]


def test_a_step_is_told_nothing_that_the_device_decides():
    """Accepted counts, lengths and last tokens of decoding requests live on the device alone."""
    assert DecodeInputs._fields == ("slots", "page_table")
    assert set(PrefillInputs._fields) == {
        *("slots", "starts", "counts", "tokens", "next_tokens"),
        *("page_table", "limits", "stop_ids", "sampling"),
    }
    before = pack(DECODE, NUM_SLOTS, PAGES_PER_SEQ)
    sequence = make_sequence(4, 8)
    sequence.output, sequence.num_in_flight, sequence.num_prefilled = [1, 2, 3], 2, 8
    after = pack(DecodePlan((sequence,), 1, 2), NUM_SLOTS, PAGES_PER_SEQ)
    np.testing.assert_array_equal(after[0], before[0])


@pytest.mark.parametrize("plan", [PREFILL, DECODE], ids=["prefill", "decode"])
def test_every_packed_array_is_fresh(plan):
    """JAX may read the array it was given, or even keep it, after the call returns."""
    first, second = (pack(plan, NUM_SLOTS, PAGES_PER_SEQ) for _ in range(2))
    assert first.flags.owndata and second.flags.owndata
    expected = second.copy()
    first[:] = 77
    np.testing.assert_array_equal(second, expected)
    np.testing.assert_array_equal(pack(plan, NUM_SLOTS, PAGES_PER_SEQ), expected)


@pytest.fixture(scope="module")
def tiny_engine():
    """A random model of two layers; steps of at most 32 prompt tokens."""
    target = Llama(
        vocab_size=61,
        hidden_size=16,
        intermediate_size=24,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        rms_norm_eps=1e-5,
        rope=Rope(head_dim=8),
        max_position=96,
    )
    rng = np.random.default_rng(0)
    weights = jax.tree.map(
        lambda spec: jnp.asarray(rng.normal(size=spec.shape), jnp.float32), target.specs()
    )
    config = EngineConfig(max_model_len=96, max_num_seqs=2, max_num_batched_tokens=32, num_pages=12)
    return Engine(config, target, NoDrafter(), Params(weights, None), StaticPolicy(0))


def generate(engine):
    rng = np.random.default_rng(1)
    for i, length in enumerate([40, 3, 17, 32, 1]):
        engine.add(Request(i, tuple(rng.integers(0, 61, length).tolist()), 12, 0.8, i, ()))
    outputs = {}
    while engine.has_work:
        for sequence in engine.step():
            outputs[sequence.request.request_id] = list(sequence.output)
        yield outputs


def test_packed_arrays_are_done_with_when_their_results_are_there(tiny_engine, monkeypatch):
    """Overwriting them then changes nothing: no step looks at what an earlier one was told."""
    *_, expected = generate(tiny_engine)
    assert sorted(map(len, expected.values())) == [12] * 5
    given = []

    def recording_pack(*arguments):
        # Aligned as XLA likes it, so that the device uses the host's memory without a copy.
        packed = pack(*arguments)
        memory = np.zeros(packed.nbytes + 64, np.uint8)
        start = -memory.ctypes.data % 64
        aligned = memory[start : start + packed.nbytes].view(np.int32).reshape(packed.shape)
        aligned[:] = packed
        given.append(aligned)
        return aligned

    monkeypatch.setattr(specjax.engine, "pack", recording_pack)
    outputs = {}
    for outputs in generate(tiny_engine):  # noqa: B007
        for packed in given[:-1]:  # the last one is in flight
            packed[:] = 1
    assert len(given) > 20
    assert outputs == expected
