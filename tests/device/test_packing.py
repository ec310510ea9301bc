"""Packed inputs: the device reads the values that the host wrote, for any declared fields."""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.shapes import checked

from specjax.device.inputs import AdmitInputs, DecodeInputs, PrefillInputs, SnapshotInputs
from specjax.device.layout import Layout
from specjax.device.packing import packed
from specjax.device.requests import init_requests
from specjax.device.state import init_state
from specjax.device.step import admit

LAYOUT = Layout(5, 40, 6, 70, num_tables=2, num_snapshots=3)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class MoreInputs:
    """Fields of one or several words, with several dtypes, between single numbers."""

    slots: Any = packed("num_slots")
    first: Any = packed(-1)
    pages: Any = packed(7, "pages_per_seq")
    nested: Any = packed(lambda layout: {"x": np.full(1, 0.5, np.float32), "y": ids(layout)})
    last: Any = packed(0)


def ids(layout):
    return np.full((1, layout.mask_words), 2**32 - 1, np.uint32)


KINDS = [AdmitInputs, DecodeInputs, PrefillInputs, SnapshotInputs, MoreInputs]


@pytest.mark.parametrize("kind", KINDS)
def test_the_device_reads_what_the_host_fills(kind):
    packing, rng = LAYOUT.packing(kind), np.random.default_rng(0)
    array, rows = packing.rows(4)
    assert array.shape == packing.shape(4) and array.dtype == np.int32
    for leaf in jax.tree.leaves(rows):
        leaf[1:3] = rng.integers(0, 2**20, leaf[1:3].shape)
    read = jax.device_get(jax.jit(packing.unpack)(array))
    for given, found in zip(jax.tree.leaves(rows), jax.tree.leaves(read), strict=True):
        assert given.dtype == found.dtype
        np.testing.assert_array_equal(given, found)


def test_rows_that_nobody_fills_are_padding():
    packing = LAYOUT.packing(MoreInputs)
    rows = packing.views(packing.rows(2)[0])
    assert rows.slots.tolist() == [5, 5] and rows.first.tolist() == [-1, -1]
    assert rows.pages.tolist() == [[7] * 6] * 2 and rows.last.tolist() == [0, 0]
    assert rows.nested["x"].tolist() == [0.5, 0.5] and (rows.nested["y"] == 2**32 - 1).all()
    packing.rows(2)[1].first[:] = 3
    assert packing.rows(2)[1].first.tolist() == [-1, -1], "each array is a new one"


@pytest.mark.slow
def test_what_is_not_as_declared_is_refused_before_anything_runs():
    """In tests, all functions of a step check their arguments; see `check_boundary`."""
    state = init_state(4, 16, 40, (), (), None)
    tokens = jnp.zeros((2, 16), jnp.int32)
    inputs = AdmitInputs(jnp.zeros(2, jnp.int32), init_requests(2, 40), tokens)
    assert checked(admit)(state, inputs).requests.limits.shape == (4,)
    wrong = {
        "inputs.tokens": (state, replace(inputs, tokens=jnp.zeros((2, 16)))),
        "inputs.requests.prompt_lengths": (state, replace(inputs, slots=jnp.zeros(3, jnp.int32))),
        "state.progress": (replace(state, progress=jnp.zeros((4, 2), jnp.int32)), inputs),
    }
    for field, arguments in wrong.items():
        with pytest.raises(TypeError, match=rf"admit: {field} is "):
            checked(admit)(*arguments)
