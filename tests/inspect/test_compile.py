"""What compile.py reports and hlo.py counts, for functions with known answers."""

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
    """For compile.py: return the function `name` of this file, with its arguments."""
    wide = jax.ShapeDtypeStruct((ROWS, COLUMNS), jnp.float32)
    index = jax.ShapeDtypeStruct((), jnp.int32)
    args = {
        "donating": ({"kept": wide}, wide),
        "take_rows": (wide, jax.ShapeDtypeStruct((4,), jnp.int32)),
        "overwrite_row": (wide, index),
        "switch": (wide, index),
    }
    return globals()[name], args.get(name, (wide,)), {"k": 3} if name == "donating" else {}


# Passes are written or read, so many times.
PASSES = {
    # A parameter is no pass, and a result is one.
    "double": [("write", 1)],
    "take_rows": [("write", 1)],
    # In place.
    "overwrite_row": [("write", 1)],
    # A view of another shape is the same array.
    "flatten": [("write", 1), ("read", 1)],
    # Once per trip.
    "loop": [("write", 1), ("read", 3), ("read", 3), ("write", 3)],
}


@pytest.fixture(scope="module")
def reports(compile_for_h200):
    """Reports by function name."""
    over = {"num_elements": ROWS * COLUMNS, "columns": COLUMNS}
    cases = {name: ("program", {"name": name}) for name in (*PASSES, "donating", "switch")}
    # Of few thunks XLA would make no graph.
    graph = {"xla_gpu_graph_min_graph_size": 1}
    whole = {"whole switch": ("program", {"name": "switch"})}
    other = {"h100": ("program", {"name": "double"})}
    return {
        **compile_for_h200(__file__, cases, passes_over=over),
        **compile_for_h200(__file__, whole, options=graph),
        **compile_for_h200(__file__, other, gpu="h100"),
    }


@pytest.mark.parametrize("name", PASSES)
def test_passes(reports, name):
    passes = reports[name]["passes"]
    assert [(one["access"], one["times"]) for one in passes] == PASSES[name]
    count = sum(times for _, times in PASSES[name])
    assert reports[name]["num_passes"] == [count, count]
    assert {one["shape"].partition("{")[0] for one in passes} <= {
        f"f32[{ROWS},{COLUMNS}]",
        f"f32[{ROWS * COLUMNS}]",
    }
    assert {one["num_bytes"] for one in passes} == {4 * ROWS * COLUMNS}


def test_static_arguments_and_donation(reports):
    num_bytes = 4 * ROWS * COLUMNS
    memory = reports["donating"]["memory"]
    assert memory["alias"] == num_bytes
    assert memory["argument"] == 2 * num_bytes
    assert memory["temp"] == 0


def within(report):
    return {thunk["name"]: thunk["within"] for thunk in report["thunks"]}


def test_thunks(reports):
    assert len(reports["take_rows"]["top_level"]) == 2
    around = within(reports["loop"])
    assert around["loop_compare_fusion"] == ["kWhile", "condition"]
    assert around["loop_sine_fusion"] == ["kWhile", "body"]
    assert within(reports["switch"])["wrapped_sine"] == ["kConditional", "branch_0"]


def test_each_branch_counts_for_itself(reports):
    report = reports["switch"]
    branches = [[branch for _, branch in one["branches"]] for one in report["passes"]]
    assert branches == [[], [0], [0], [1], [2], [2]]
    assert report["num_passes"] == [3, 2]


def test_whether_it_is_one_cuda_graph(reports):
    few, whole = reports["switch"], reports["whole switch"]
    assert few["uncaptured_conditionals"] == [""] and not few["is_one_command_buffer"]
    assert whole["uncaptured_conditionals"] == [] and whole["is_one_command_buffer"]


def test_the_named_gpu_is_the_one_compiled_for(reports):
    assert reports["double"]["device_kind"] == "NVIDIA H200"
    assert reports["h100"]["device_kind"] == "NVIDIA H100 80GB HBM3"
