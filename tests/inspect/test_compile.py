"""The tool itself: what compile.py reports and hlo.py counts, on functions with known answers."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest

ROWS, COLUMNS = 64, 50_000

pytestmark = pytest.mark.h200


@partial(jax.jit, static_argnames="k", donate_argnames="state")
def donating(state, x, *, k):
    return {"kept": state["kept"] + k}, x * 2


@jax.jit
def take_rows(x, rows):
    y = jax.lax.optimization_barrier(x * 2)
    return y[rows]


@jax.jit
def loop(x):
    return jax.lax.fori_loop(0, 3, lambda _, y: jnp.sin(y @ jnp.eye(COLUMNS, 1) + y), x)


@jax.jit
def overwrite_row(x, row):
    y = jax.lax.optimization_barrier(x * 2)
    return y.at[row].set(0.0)


@jax.jit
def flatten(x):
    y = jax.lax.optimization_barrier((x * 2).reshape(-1))
    return jnp.argmax(y.reshape(ROWS, COLUMNS), axis=1)


@jax.jit
def switch(x, which):
    return jax.lax.switch(which, [jnp.sin, jnp.zeros_like, lambda x: jnp.flip(x, 0)], x * 2)


@jax.jit
def double(x):
    return x * 2


def program(name):
    """For compile.py: a function of this file by its name."""
    wide = jax.ShapeDtypeStruct((ROWS, COLUMNS), jnp.float32)
    index = jax.ShapeDtypeStruct((), jnp.int32)
    args = {
        "donating": ({"kept": wide}, wide),
        "take_rows": (wide, jax.ShapeDtypeStruct((4,), jnp.int32)),
        "overwrite_row": (wide, index),
        "switch": (wide, index),
    }
    return globals()[name], args.get(name, (wide,)), {"k": 3} if name == "donating" else {}


NAMES = "donating", "take_rows", "loop", "overwrite_row", "flatten", "switch", "double"


@pytest.fixture(scope="module")
def reports(compile_for_h200):
    """Reports by the function's name."""
    over = {"num_elements": ROWS * COLUMNS, "columns": COLUMNS}
    requests = [
        {"function": "program", "arguments": {"name": name}, "passes_over": over} for name in NAMES
    ]
    requests.append({**requests[-1], "gpu": "h100"})
    return dict(zip([*NAMES, "h100"], compile_for_h200(__file__, requests), strict=True))


def accesses(report):
    return [(one["access"], one["times"]) for one in report["passes"]]


def test_a_parameter_is_no_pass_and_a_result_is_one(reports):
    assert accesses(reports["double"]) == [("write", 1)]


def test_static_arguments_and_donation(reports):
    num_bytes = 4 * ROWS * COLUMNS
    memory = reports["donating"]["memory"]
    assert memory["alias"] == num_bytes
    assert memory["argument"] == 2 * num_bytes
    assert memory["temp"] == 0


def test_taking_rows_is_no_pass(reports):
    assert accesses(reports["take_rows"]) == [("write", 1)]
    assert len(reports["take_rows"]["top_level"]) == 2


def test_an_update_in_place_is_no_pass(reports):
    assert accesses(reports["overwrite_row"]) == [("write", 1)]


def test_a_view_of_another_shape_is_the_same_array(reports):
    assert accesses(reports["flatten"]) == [("write", 1), ("read", 1)]
    assert reports["flatten"]["num_passes"] == [2, 2]


def test_a_loop_counts_once_per_trip(reports):
    report = reports["loop"]
    assert accesses(report) == [("write", 1), ("read", 3), ("read", 3), ("write", 3)]
    assert report["num_passes"] == [10, 10]
    around = {thunk["name"]: thunk["within"] for thunk in report["thunks"]}
    assert around["loop_compare_fusion"] == ["kWhile", "condition"]
    assert around["loop_sine_fusion"] == ["kWhile", "body"]


def test_each_branch_counts_for_itself(reports):
    report = reports["switch"]
    branches = [[branch for _, branch in one["branches"]] for one in report["passes"]]
    assert branches == [[], [0], [0], [1], [2], [2]]
    assert report["num_passes"] == [3, 2]
    assert report["uncaptured_conditionals"] == [""]  # fewer thunks than XLA makes a graph of
    around = {thunk["name"]: thunk["within"] for thunk in report["thunks"]}
    assert around["wrapped_sine"] == ["kConditional", "branch_0"]


def test_the_named_gpu_is_the_one_compiled_for(reports):
    assert reports["double"]["device_kind"] == "NVIDIA H200"
    assert reports["h100"]["device_kind"] == "NVIDIA H100 80GB HBM3"
