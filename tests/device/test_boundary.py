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


def test_what_is_not_as_declared_is_refused_before_anything_runs():
    state = init_state(4, LENGTH, VOCAB, (), (), None)
    tokens = jnp.zeros((2, LENGTH), jnp.int32)
    inputs = AdmitInputs(jnp.zeros(2, jnp.int32), init_requests(2, VOCAB), tokens)
    assert checked(admit)(state, inputs).requests.limits.shape == (4,)
    wrong = {
        "inputs.tokens": (state, replace(inputs, tokens=jnp.zeros((2, LENGTH)))),
        "inputs.requests.prompt_lengths": (state, replace(inputs, slots=jnp.zeros(3, jnp.int32))),
        "state.progress": (replace(state, progress=jnp.zeros((4, 2), jnp.int32)), inputs),
    }
    for field, arguments in wrong.items():
        with pytest.raises(TypeError, match=rf"admit: {field} is "):
            checked(admit)(*arguments)
