"""Conversions between plans and packed arrays are complete, and each packed array is new."""

from dataclasses import dataclass, fields, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.device.drafters.drafter import Variant
from specjax.device.extras import Extras
from specjax.device.inputs import AdmitInputs, DecodeInputs, PrefillInputs, SnapshotInputs
from specjax.device.layout import Layout
from specjax.device.logprobs import Logprobs, pack_logprobs
from specjax.device.requests import init_requests
from specjax.device.state import init_state
from specjax.device.step import StepOutputs, admit
from specjax.engine.admissions import pack_admissions
from specjax.engine.batch import pack, pack_masks, pack_outputs, pack_snapshots, unpack_outputs
from specjax.host.plans import Chunk, DecodePlan, PrefillPlan
from specjax.host.request import Request
from specjax.host.residency import Residency, slot_of
from specjax.host.sequence import Sequence
from specjax.outputs import Logprob
from specjax.sampling_params import (
    MAX_BAD_WORD_TOKENS,
    MAX_BAD_WORDS,
    MAX_LOGIT_BIAS,
    MAX_STOP_IDS,
    SamplingParams,
)

NUM_SLOTS, PAGES_PER_SEQ, WIDTH, MAX_LEN, VOCAB = 9, 6, 8, 40, 70
LAYOUT = Layout(NUM_SLOTS, MAX_LEN, PAGES_PER_SEQ, VOCAB, num_snapshots=7)
ADMIT = jax.jit(lambda state, packed: admit(state, LAYOUT.packing(AdmitInputs).unpack(packed)))


def make_sequence(slot, prompt_length, *, index=0, num_pages=2, seeds=(0,), **params):
    """Return a sequence with the prompt slot, slot + 1, ... and at most five output tokens."""
    own = {n: params.pop(n) for n in ("stop_ids", "bad_words", "processor") if n in params}
    prompt = tuple(range(slot, slot + prompt_length))
    request = Request(100 + slot, prompt, SamplingParams(**params), 5, seeds, **own)
    sequence = Sequence.of(request, index, 0)
    pages = [10 * slot + page for page in range(num_pages)]
    sequence.residency = Residency(slot=slot, num_to_prefill=prompt_length, pages=pages)
    return sequence


CHUNKS = (
    Chunk(make_sequence(4, 8), 0, 8, is_first=True, is_last=True),
    Chunk(make_sequence(0, 20, num_pages=PAGES_PER_SEQ), 8, 8),
    Chunk(make_sequence(8, 3, num_pages=0), 2, 1, is_last=True, is_resumed=True),
)
PREFILL = PrefillPlan(CHUNKS, 5, WIDTH)
DECODE = DecodePlan(PREFILL.sequences, 4, 2, 1)
PAGE_TABLES = np.full((NUM_SLOTS, 1, PAGES_PER_SEQ), -1, np.int32)
for sequence_ in PREFILL.sequences:
    row = PAGE_TABLES[slot_of(sequence_), 0]
    row[: len(sequence_.residency.pages)] = sequence_.residency.pages


def padded(values, length):
    return [*values, *[-1] * (length - len(values))]


# --- steps ----------------------------------------------------------------------------------------


def test_rows_are_a_slot_what_it_does_and_its_pages():
    """Padding rows have a slot number past the last slot, and do nothing."""
    none = [-1] * PAGES_PER_SEQ
    chunks = [
        [slot_of(one.sequence), one.start, one.count, one.is_last, one.is_resumed, 2]
        + padded(one.sequence.residency.pages, PAGES_PER_SEQ)
        for one in CHUNKS
    ]
    packed = pack(PREFILL, PAGE_TABLES, LAYOUT, Extras.LOGPROBS)
    assert packed.dtype == np.int32 and Extras.LOGPROBS == 2
    assert packed.tolist() == chunks + 2 * [[NUM_SLOTS, 0, 0, 0, 0, 2, *none]]
    stays = [sequence.residency for sequence in DECODE.sequences]
    rows = [[stay.slot, 1, 1, *padded(stay.pages, PAGES_PER_SEQ)] for stay in stays]
    packed = pack(DECODE, PAGE_TABLES, LAYOUT, Extras.EDITS)
    assert packed.dtype == np.int32 and Extras.EDITS == 1
    assert packed.tolist() == [*rows, [NUM_SLOTS, 1, 1, *none]]


def test_a_step_is_told_nothing_that_the_device_decides():
    """Only the device knows a request's accepted counts, length and last token while it decodes."""
    for inputs, names in {
        AdmitInputs: "slots requests tokens",
        SnapshotInputs: "slots ids ends",
        PrefillInputs: "slots starts counts is_last is_resumed extras page_tables",
        DecodeInputs: "slots num_drafts extras page_tables suggestions",
    }.items():
        assert [field.name for field in fields(inputs)] == names.split()
    before = pack(DECODE, PAGE_TABLES, LAYOUT, Extras(0))
    sequence = make_sequence(4, 8)
    sequence.token_ids += [1, 2, 3]
    sequence.num_in_flight, sequence.max_tokens_in_flight = 2, 6
    sequence.residency.num_computed = 8
    after = pack(DecodePlan((sequence,), 1, 2, 1), PAGE_TABLES, LAYOUT, Extras(0))
    np.testing.assert_array_equal(after[0], before[0])


def test_snapshot_rows_are_slot_id_and_tokens():
    """A taken snapshot counts the tokens up to the chunk's end, a restored one up to its start."""
    first, second = replace(CHUNKS[1], taken=3), replace(CHUNKS[2], restored=1)
    taken = pack_snapshots([first], 2, LAYOUT, is_taken=True)
    assert taken.dtype == np.int32 and taken.tolist() == [[0, 3, 16], [NUM_SLOTS, 7, 0]]
    restored = pack_snapshots([second], 2, LAYOUT, is_taken=False)
    assert restored.tolist() == [[8, 1, 2], [NUM_SLOTS, 7, 0]]


# --- admissions -----------------------------------------------------------------------------------

PLAIN = make_sequence(2, 1, temperature=0.0, seeds=(3,))
FULL = make_sequence(
    7,
    MAX_LEN - 5,
    index=2,
    seeds=(1, 2, 2**32 - 1),
    stop_ids=tuple(range(60, 60 + MAX_STOP_IDS)),
    bad_words=tuple(tuple(range(i, i + 1 + i % MAX_BAD_WORD_TOKENS)) for i in range(MAX_BAD_WORDS)),
    processor=2**20,
    temperature=1e-30,
    top_k=VOCAB + 5,
    top_p=0.3,
    min_p=0.1,
    repetition_penalty=1.2,
    presence_penalty=-0.7,
    frequency_penalty=2,
    min_tokens=4,
    logit_bias={i: i / 7 - 3 for i in range(VOCAB)},
    allowed_token_ids=[0, 31, 32, 63, 64, VOCAB - 1],
)
SOME = make_sequence(
    0,
    3,
    seeds=(2**31,),
    stop_ids=(5,),
    bad_words=((9,), (8, 7)),
    processor=0,
    top_k=-1,
    logit_bias={VOCAB - 1: -1e30},
    allowed_token_ids=[33],
)


def used_state():
    """Return a state in which all slots have values, so that an overwritten slot is noticed."""
    shapes = jax.eval_shape(lambda: init_state(NUM_SLOTS, MAX_LEN, VOCAB, (), (), jnp.zeros(3)))

    def full_of(value, tree):
        return jax.tree.map(lambda x: np.full(x.shape, value, x.dtype), tree)

    marked = {
        name: full_of(77, getattr(shapes, name)) for name in ("requests", "tokens", "progress")
    }
    return replace(full_of(0, shapes), drafter=np.ones(3, np.float32), **marked)


@pytest.fixture(scope="module")
def admitted():
    """Return the state after the admission of three requests in a batch of five."""
    packed = pack_admissions([PLAIN, FULL, SOME], 5, LAYOUT)
    assert packed.dtype == np.int32 and packed.shape == LAYOUT.packing(AdmitInputs).shape(5)
    return jax.device_get(ADMIT(used_state(), packed))


@pytest.mark.parametrize("sequence", [PLAIN, FULL, SOME], ids=["plain", "full", "some"])
def test_a_request_arrives_in_its_slot(admitted, sequence):
    request, params = sequence.request, sequence.request.params
    at = jax.tree.map(lambda x: x[slot_of(sequence)], admitted.requests)
    sampling, edits = at.sampling, at.edits
    prompt = list(request.prompt_token_ids)
    assert admitted.tokens[slot_of(sequence)][: len(prompt)].tolist() == prompt
    assert not admitted.is_active[slot_of(sequence)]
    assert at.prompt_lengths == len(prompt)
    assert at.limits == request.max_length == len(prompt) + 5
    assert at.stop_ids.tolist() == padded(request.stop_ids, MAX_STOP_IDS)
    assert sampling.seeds == request.seeds[sequence.index] and sampling.seeds.dtype == np.uint32
    assert sampling.top_k == max(0, min(params.top_k, VOCAB))
    assert edits.min_tokens == params.min_tokens
    for found, value in (
        (sampling.temperature, params.temperature),
        (sampling.top_p, params.top_p),
        (sampling.min_p, params.min_p),
        (edits.repetition, params.repetition_penalty),
        (edits.presence, params.presence_penalty),
        (edits.frequency, params.frequency_penalty),
    ):
        assert found.dtype == np.float32 and found == np.float32(value)
    assert edits.processor == request.processor

    count = len(params.logit_bias)
    assert edits.bias_ids.tolist() == padded(params.logit_bias, MAX_LOGIT_BIAS)
    assert edits.bias[:count].tolist() == [np.float32(x) for x in params.logit_bias.values()]
    words = edits.bad_words.reshape(MAX_BAD_WORDS, MAX_BAD_WORD_TOKENS).tolist()
    expected = [padded(word[::-1], MAX_BAD_WORD_TOKENS)[::-1] for word in request.bad_words]
    assert words[: len(expected)] == expected
    assert {token for word in words[len(expected) :] for token in word} <= {-1}
    allowed = params.allowed_token_ids
    for token in range(VOCAB):
        is_set = edits.allowed[token // 32] >> token % 32 & 1
        assert is_set == (allowed is None or token in allowed)


def test_an_admission_leaves_all_other_slots_alone(admitted):
    before, slots = jax.device_get(used_state()), list(map(slot_of, (PLAIN, FULL, SOME)))
    others = np.delete(np.arange(NUM_SLOTS), slots)
    for name in "tokens", "progress", "requests":
        jax.tree.map(
            lambda x, y: np.testing.assert_array_equal(x[others], y[others]),
            getattr(admitted, name),
            getattr(before, name),
        )
    assert not admitted.progress[slots].any()
    np.testing.assert_array_equal(admitted.drafter, before.drafter)
    # An id of -1 past a prompt would embed, or be counted for, the vocabulary's last token.
    assert (admitted.tokens >= 0).all()


def test_a_preempted_request_comes_back_with_its_output():
    sequence = make_sequence(3, 4)
    sequence.token_ids += [50, 51, 52]
    state = jax.device_get(ADMIT(used_state(), pack_admissions([sequence], 1, LAYOUT)))
    assert state.tokens[3][:7].tolist() == [3, 4, 5, 6, 50, 51, 52]
    assert state.requests.prompt_lengths[3] == 4 and state.requests.limits[3] == 9


def test_every_field_of_a_request_has_its_place():
    """Packing and unpacking gives a tree with the shapes and dtypes of the device's tree.

    Rows without a request have the values of an empty slot.
    """
    packing = LAYOUT.packing(AdmitInputs)
    requests = jax.device_get(init_requests(NUM_SLOTS, VOCAB))
    unpacked = packing.views(pack_admissions([FULL], NUM_SLOTS, LAYOUT))
    shapes = jax.tree.map(lambda x: (x.shape, x.dtype), (unpacked.requests, requests))
    assert shapes[0] == shapes[1]
    width = sum(leaf.size // NUM_SLOTS for leaf in jax.tree.leaves(requests))
    assert packing.shape(3) == (3, 1 + width + MAX_LEN)
    assert unpacked.slots.tolist() == [slot_of(FULL), *[NUM_SLOTS] * (NUM_SLOTS - 1)]
    jax.tree.map(np.testing.assert_array_equal, unpacked.requests.at(1), requests.at(0))
    assert (unpacked.tokens[1] == -1).all()


# --- masks ----------------------------------------------------------------------------------------


@dataclass
class NumberingMatcher:
    """A matcher whose masks are numbers that show for which drafts they were made."""

    number: int
    is_finished: bool = False

    def masks(self, drafts):
        rows = [self.number + 100 * sum(drafts[:i]) for i in range(len(drafts) + 1)]
        return np.array(rows, np.int32)[:, None] + np.arange(LAYOUT.mask_words, dtype=np.int32)


def with_matcher(plan, *numbers):
    """Return the plan, with a new matcher for each sequence that has a number in `numbers`."""
    new = [
        replace(sequence, matcher=None if number is None else NumberingMatcher(number))
        for sequence, number in zip(plan.sequences, numbers, strict=True)
    ]
    if isinstance(plan, DecodePlan):
        return replace(plan, sequences=tuple(new))
    chunks = [replace(c, sequence=s) for c, s in zip(plan.chunks, new, strict=True)]
    return replace(plan, chunks=tuple(chunks))


def test_masks_stand_in_the_rows_of_their_requests():
    """All tokens are permitted without a grammar, and for sequences that have already ended.

    A sequence may end on the host while a step is in flight.
    """
    drafts = np.array([[1, 2], [3, 4], [5, 6], [7, 8]], np.int32)
    plan = with_matcher(DECODE, 10_000, 30_000, 20_000)
    plan.sequences[1].finish_reason = "stop"
    masks = pack_masks(plan, drafts, LAYOUT)
    assert masks.dtype == np.int32 and masks.shape == (4, 3, 3)
    assert masks[0].tolist() == [[n, n + 1, n + 2] for n in (10_000, 10_100, 10_300)]
    assert masks[2].tolist() == [[n, n + 1, n + 2] for n in (20_000, 20_500, 21_100)]
    assert (masks[[1, 3]] == -1).all()


def test_nothing_is_known_before_a_first_token():
    masks = pack_masks(with_matcher(PREFILL, None, 10_000, 20_000), None, LAYOUT)
    assert masks.shape == (5, 1, 3)
    assert masks[1:3, 0].tolist() == [[n, n + 1, n + 2] for n in (10_000, 20_000)]
    assert (masks[[0, 3, 4]] == -1).all()


# --- outputs --------------------------------------------------------------------------------------

NOTHING_MORE = Variant()
TOKENS = np.array([[5, 6, 7], [8, 9, 9], [4, 4, 4], [1, 1, 1]], np.int32)
DRAFTS = np.array([2, 1, 0, 1], np.int32)


def numbered(count, num_top, first=0, *, has_raw=False):
    """Return made-up log-probabilities.

    Tokens' own values and their ranks count up from `first`. Raw values are 1000 more.
    """
    own, top = first + np.arange(count), np.zeros((count, num_top))
    ints = own.astype(np.int32), top.astype(np.int32)
    raw = (own + 1000).astype(np.float32) if has_raw else None
    return Logprobs(own.astype(np.float32), *ints, top.astype(np.float32), raw)


def unpacked(plan, tokens, counts, drafts, prompts=None, variant=NOTHING_MORE, *, has_raw=False):
    """Pack the results of a step on the device, unpack them on the host, and return the rows."""
    made = numbered(tokens.size, variant.num_logprobs, 100, has_raw=has_raw)
    logprobs = pack_logprobs(made, len(tokens))
    of_prompts = None if prompts is None else pack_logprobs(prompts, len(tokens))
    outputs = StepOutputs(tokens, np.array(counts, np.int32), drafts, logprobs, of_prompts)
    packed = np.asarray(jax.jit(pack_outputs)(outputs))
    assert packed.dtype == np.int32
    return unpack_outputs(packed, plan, variant, has_raw=has_raw)


def test_outputs_round_trip():
    """Log-probabilities are tested in tests/test_logprobs.py."""
    sequences = tuple(map(make_sequence, range(3), (5, 6, 7)))
    found = unpacked(replace(DECODE, sequences=sequences), TOKENS, (3, 1, 0, 2), DRAFTS)
    assert [row.tokens for row in found] == [[5, 6, 7], [8], []]
    assert [row.num_drafts for row in found] == [2, 1, 0]
    plan = PrefillPlan(tuple(Chunk(sequence, 0, 5) for sequence in sequences), 4, WIDTH)
    begun = unpacked(plan, TOKENS[:, :1], (1, 1, 0, 1), 0 * DRAFTS)
    assert [row.tokens for row in begun] == [[5], [8], []]
    assert all(row.logprobs is None and row.prompt_logprobs is None for row in found + begun)


@pytest.mark.parametrize("has_raw", [False, True])
def test_prompt_logprobs_come_after_logprobs_that_nobody_wants(has_raw):
    """Prompt log-probabilities belong to the tokens after each row of the chunk."""
    plan = PrefillPlan((Chunk(make_sequence(0, 20, prompt_logprobs=0), 7, 8),), 1, WIDTH)
    variant = Variant(num_logprobs=4, num_prompt_logprobs=3)
    prompts = numbered(8, 3, has_raw=has_raw)
    step = plan, TOKENS[:1, :1], (0,), DRAFTS[2:3]
    (row,) = unpacked(*step, prompts, variant, has_raw=has_raw)
    assert row.logprobs is None and row.start == 7
    raw = [1000.0 + i if has_raw else None for i in range(8)]
    expected = [{8 + i: Logprob(float(i), i, None, raw[i])} for i in range(8)]
    assert row.prompt_logprobs == expected


# --- the host's memory ----------------------------------------------------------------------------


@pytest.mark.parametrize("plan", [PREFILL, DECODE], ids=["prefill", "decode"])
def test_every_packed_array_is_fresh(plan):
    """JAX may still read a packed array, or keep it, after the call has returned."""
    plan = with_matcher(plan, 10_000, None, 20_000)

    def arrays():
        drafts = np.zeros((4, 2), np.int32) if isinstance(plan, DecodePlan) else None
        return (
            pack(plan, PAGE_TABLES, LAYOUT, Extras(0)),
            pack_admissions([PLAIN, FULL], 3, LAYOUT),
            pack_snapshots([replace(CHUNKS[0], taken=2)], 3, LAYOUT, is_taken=True),
            pack_masks(plan, drafts, LAYOUT),
        )

    table = PAGE_TABLES.copy()
    first, second = arrays(), arrays()
    expected = [array.copy() for array in second]
    for array in first:
        assert array.flags.owndata
        array[:] = 77
    np.testing.assert_array_equal(PAGE_TABLES, table)
    for again in second, arrays():
        for array, wanted in zip(again, expected, strict=True):
            np.testing.assert_array_equal(array, wanted)
