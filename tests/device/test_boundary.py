"""Shapes and dtypes that the types of a step's inputs and results declare are checked in tests."""

from dataclasses import replace

import jax.numpy as jnp
import pytest
from support.shapes import checked

from specjax.device.inputs import AdmitInputs
from specjax.device.requests import init_requests
from specjax.device.state import init_state
from specjax.device.step import admit

VOCAB, LENGTH = 40, 16
STATE = init_state(4, LENGTH, VOCAB, (), (), None)
INPUTS = AdmitInputs(
    jnp.zeros(2, jnp.int32), init_requests(2, VOCAB), jnp.zeros((2, LENGTH), jnp.int32)
)
ADMIT = checked(admit)


def test_what_is_as_declared_passes():
    assert ADMIT(STATE, INPUTS).requests.limits.shape == (4,)


@pytest.mark.parametrize(
    "inputs, field",
    [
        (replace(INPUTS, slots=jnp.zeros(3, jnp.int32)), "requests.prompt_lengths"),
        (replace(INPUTS, slots=jnp.zeros((2, 1), jnp.int32)), "slots"),
        (replace(INPUTS, tokens=jnp.zeros((2, LENGTH))), "tokens"),
        (replace(INPUTS, requests=init_requests(1, VOCAB)), "requests.prompt_lengths"),
    ],
    ids=["rows", "axes", "dtype", "rows-inside"],
)
def test_what_is_not_is_refused_before_anything_runs(inputs, field):
    with pytest.raises(TypeError, match=rf"admit: inputs\.{field} is "):
        ADMIT(STATE, inputs)


def test_a_state_that_is_not_as_declared():
    state = replace(STATE, progress=jnp.zeros((4, 2), jnp.int32))
    with pytest.raises(TypeError, match=r"admit: state\.progress is int32\[4,2\]"):
        ADMIT(state, INPUTS)
