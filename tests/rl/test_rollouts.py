"""Rollouts as arrays."""

from dataclasses import replace

import numpy as np
import pytest
from support.refusals import refusal
from support.rollouts import made_rollout

from specjax.rl import RolloutBatch, Span

PAD = 7


def rollout(prompt, output, versions=(), *, raw=True):
    logprobs = -np.arange(1, len(output) + 1, dtype=np.float32)
    raw_logprobs, versions = 2 * logprobs if raw else None, tuple(Span(*one) for one in versions)
    return made_rollout(prompt, output, logprobs, raw_logprobs=raw_logprobs, versions=versions)


def test_prompts_end_and_outputs_begin_in_one_column():
    rows = [
        rollout([1, 2, 3], [4, 5], [(3, 1), (4, 1)]),
        replace(rollout([1], []), finish_reason="abort"),
        replace(rollout([8, 9], [1, 2, 3], [(4, 3)]), prompt_index=1, finish_reason="length"),
    ]
    batch = RolloutBatch(rows)
    arrays = batch.padded(PAD)
    assert arrays.prompt_indices.tolist() == [0, 0, 1]
    assert arrays.is_complete.tolist() == [True, False, True]
    assert arrays.prompt_tokens.tolist() == [[1, 2, 3], [PAD, PAD, 1], [PAD, 8, 9]]
    assert arrays.tokens.tolist() == [[4, 5, PAD], [PAD] * 3, [1, 2, 3]]
    assert arrays.mask.tolist() == [[True, True, False], [False] * 3, [True] * 3]
    assert arrays.logprobs.tolist() == [[-1, -2, 0], [0, 0, 0], [-1, -2, -3]]
    assert arrays.raw_logprobs.tolist() == [[-2, -4, 0], [0, 0, 0], [-2, -4, -6]]
    assert arrays.versions.tolist() == [[3, 4, -1], [-1] * 3, [4, 4, 4]]
    assert arrays.prompt_lengths.tolist() == [3, 1, 2] and arrays.lengths.tolist() == [2, 0, 3]
    kinds = {name: array.dtype.name for name, array in arrays._asdict().items()}
    booleans = "mask", "is_complete", "reuses_noise"
    assert {kinds.pop(name) for name in booleans} == {"bool"}
    assert {kinds.pop("logprobs"), kinds.pop("raw_logprobs")} == {"float32"}
    assert kinds.pop("versions") == "int64"
    assert set(kinds.values()) == {"int32"}
    rows = arrays.joined()
    assert rows.tokens.tolist() == [[1, 2, 3, 4, 5, PAD], [1] + [PAD] * 5, [8, 9, 1, 2, 3, PAD]]
    assert rows.mask.tolist() == [
        [False] * 2 + [True] * 2 + [False],
        [False] * 5,
        [False] + [True] * 3 + [False],
    ]
    assert rows.logprobs.tolist() == [[0, 0, -1, -2, 0], [0] * 5, [0, -1, -2, -3, 0]]
    assert rows.raw_logprobs.tolist() == (2 * rows.logprobs).tolist()
    assert rows.versions.tolist() == [[-1, -1, 3, 4, -1], [-1] * 5, [-1, 4, 4, 4, -1]]


def test_widths_may_be_given():
    batch = RolloutBatch([rollout([1, 2], [3], [(0, 1)], raw=False)])
    arrays = batch.padded(PAD, prompt_length=4, length=3)
    assert arrays.prompt_tokens.tolist() == [[PAD, PAD, 1, 2]]
    assert arrays.tokens.tolist() == [[3, PAD, PAD]] and arrays.raw_logprobs is None
    assert arrays.joined().tokens.tolist() == [[1, 2, 3, PAD, PAD, PAD, PAD]]
    with pytest.raises(ValueError, match="prompt_length=1 is less than the 2"):
        batch.padded(PAD, prompt_length=1)
    with pytest.raises(ValueError, match="length=0 is less than the 1"):
        batch.padded(PAD, length=0)


def test_versions_may_be_times():
    now = 1795872103123  # in milliseconds
    arrays = RolloutBatch([rollout([1], [2], [(now, 1)])]).padded(PAD)
    assert arrays.versions.tolist() == [[now]] and arrays.joined().versions.tolist() == [[now]]


BAD = {
    "pad_id": ["x", None, 0.5, True, 2**31, -(2**31) - 1],
    "prompt_length": ["x", 2.5, -1, True],
    "length": ["x", 2.5, -1, True],
}


@pytest.mark.parametrize("name", BAD)
def test_padding_that_is_no_integer(name):
    for value in BAD[name]:
        given = {"pad_id": PAD, name: value}
        refusal(lambda given=given: RolloutBatch([]).padded(**given), f"{name}={value!r}")


def test_a_batch_is_a_sequence():
    one, other = rollout([1], [2]), rollout([3], [4, 5])
    batch = RolloutBatch([one, other])
    assert len(batch) == 2 and batch[1] is other and list(batch) == [one, other]
    assert isinstance(batch[:1], RolloutBatch) and list(batch[:1]) == [one]
    assert batch.num_tokens == 3
    assert RolloutBatch([]).padded(PAD).tokens.shape == (0, 0)
