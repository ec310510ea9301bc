"""Kernels, their bytes and their layers, as hlo.py counts them, where the answers are known.

Small kernels with the names of our Pallas kernels show which parts of whole pools are counted.
"""

from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl

from pallas_kernels.triton_call import triton_call

BATCH, WIDTH, CONTEXT = 8, 2, 100
ROWS = BATCH * WIDTH
DIM, WIDE = 256, 1024
POOL = (3, 64, 16, 2, 4, 64)  # layers, pages, page size, 2, heads, head dim: 1 KiB a token
# Recurrent state and rings of M = 2 and W = 4: 2 key heads, 4 value heads.
STATE, RING, CORRECTIONS = (2, 32, 4, 64, 64), (2, 32, 5, 512), (2, 32, 2, 4, 64)
KEYS, DECAYS = (2, 32, 4, 2, 64), (2, 32, 4, 4)
HEADS = 8
EXPERTS = 16
TOKEN = 2 * 4 * 64 * 2

pytestmark = pytest.mark.h200


def shape(*sizes, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(sizes, dtype)


f32, i32 = partial(shape, dtype=jnp.float32), partial(shape, dtype=jnp.int32)


def call(name, operands, outputs, aliases=None):
    """Call a Pallas kernel with this name, which does almost nothing. Operands may be aliased."""

    def kernel(*refs):
        refs[-1][(pl.program_id(0), *(0,) * (len(refs[-1].shape) - 1))] = jnp.zeros(
            (), refs[-1].dtype
        )

    aliased = [jax.ShapeDtypeStruct(operands[i].shape, operands[i].dtype) for i in aliases or {}]
    return triton_call(
        kernel,
        operands,
        [*outputs, *aliased],
        name=name,
        grid=(2,),
        num_warps=4,
        aliases={i: len(outputs) + n for n, i in enumerate(aliases or {})},
    )


INTS = i32(1), i32(BATCH, 7)  # the layer, the table
INT_BYTES = 4 * (1 + BATCH * 7)
QUERY = ROWS * HEADS * 64 * 2  # bytes of q
KV = ROWS * TOKEN  # and of new keys and values
STATES = BATCH * 4 * 64 * 64 * 4
U, K_AND_DECAY = 4 * 64 * 4, 2 * 64 * 4 + 4 * 4  # bytes of a column

# Operands, outputs, operands updated in place; then the bytes read and written.
PALLAS = {
    f"paged_attention{window}": (
        (*INTS, shape(BATCH, WIDTH, HEADS, 64), shape(*POOL)),
        (f32(BATCH, WIDTH, HEADS, 64),),
        (),
        INT_BYTES + QUERY + BATCH * num_read * TOKEN,
        2 * QUERY,
    )
    for window, num_read in (("", CONTEXT), ("_window_30", 30))
} | {
    "latent_attention": (
        (*INTS, shape(BATCH, WIDTH * HEADS, 80), shape(2, 64, 16, 80)),
        (shape(BATCH, WIDTH * HEADS, 64),),
        (),
        INT_BYTES + 2 * BATCH * 80 * (WIDTH * HEADS + CONTEXT),
        QUERY,
    ),
    "rope_write": (
        (*INTS, shape(BATCH, WIDTH, (HEADS + 2 * 4) * 64), shape(*POOL)),
        (shape(BATCH, WIDTH, HEADS, 64),),
        (3,),
        INT_BYTES + QUERY + KV,
        QUERY + KV,
    ),
    "gated_delta_rule_inputs": (
        (
            *(shape(BATCH, WIDTH, 776), i32(BATCH, WIDTH), shape(4, 512)),
            *(shape(*RING), f32(*KEYS), f32(*DECAYS)),
        ),
        (f32(BATCH, WIDTH, 4, 64),),
        (3, 4, 5),
        ROWS * (776 * 2 + 4) + 4 * 1024 + BATCH * 3 * 1024,
        ROWS * (1024 + 1024 + K_AND_DECAY),
    ),
    "gated_delta_rule": (
        (
            *(f32(BATCH, WIDTH, 4, 64), i32(BATCH, WIDTH)),
            *(f32(*KEYS), f32(*DECAYS), f32(*STATE), f32(*CORRECTIONS)),
        ),
        (shape(BATCH, WIDTH, 4, 64),),
        (4, 5),
        ROWS * (1024 + 4) + STATES + BATCH * 2 * U + (BATCH * 2 + ROWS) * K_AND_DECAY,
        ROWS * 512 + STATES + ROWS * U,
    ),
    "gated_delta_rule_norm": (
        (shape(BATCH, WIDTH, 4, 64), shape(BATCH, WIDTH, 776), shape(64)),
        (),
        (0,),
        2 * ROWS * 512 + 128,
        ROWS * 512,
    ),
    "grouped_matmul_decode": (
        (shape(4, DIM), shape(EXPERTS, DIM, 512), i32(EXPERTS)),
        (shape(8, 512),),  # two experts for each of four rows
        (),
        4 * DIM * 2 + 8 * DIM * 512 * 2 + EXPERTS * 4,
        8 * 512 * 2,
    ),
    "something_else": ((shape(ROWS, DIM),), (), (0,), ROWS * DIM * 2, ROWS * DIM * 2),
}


def pallas(name):
    """For compile.py: call a kernel once, or twice if it updates an operand in place."""
    operands, outputs, aliases, *_ = PALLAS[name]

    def run(*operands):
        first = call(name, operands, outputs, aliases)
        if not aliases:
            return first
        updated = list(operands)
        for i, value in zip(aliases, first[len(outputs) :], strict=True):
            updated[i] = value
        return first[: len(outputs)], call(name, updated, outputs, aliases)

    return jax.jit(run, donate_argnums=aliases), operands, {}


@jax.jit
def mlp(params, x):
    """Two GEMMs, with a separate kernel between them."""
    hidden = jax.lax.optimization_barrier(x @ params["up"])
    return jax.lax.optimization_barrier(jax.nn.silu(hidden)) @ params["down"]


@partial(jax.jit, donate_argnums=0)
def put_rows(pool, rows, at):
    return pool.at[at].set(rows)


@jax.jit
def copied(pool, rows, at):
    """An update of a pool that is not donated, and is therefore copied."""
    return pool.at[at].set(rows)


@jax.jit
def either(x, which):
    heavy, light = (lambda x: jnp.flip(x, 0) @ x.T @ x), (lambda x: x)
    return jax.lax.cond(which, heavy, light, x)


@jax.jit
def stack(params, x, pool):
    """Four equal layers, then a head. The scopes `before` and `beside` are outside of layers."""
    with jax.named_scope("before"):
        x = jax.lax.optimization_barrier(x @ params["head"].T)
    for layer in params["layers"]:
        with jax.named_scope("layer"):
            x = jax.lax.optimization_barrier(x + jax.lax.optimization_barrier(x @ layer["up"]))
    return x @ params["head"], pool * 2


@jax.jit
def repeated(x):
    return jax.lax.fori_loop(0, 3, lambda _, x: jnp.sin(x @ x), x)


@jax.jit
def twice(x):
    """The same loop in two scopes. XLA names the kernels of both after the first scope."""
    with jax.named_scope("first"):
        x = repeated(x)
    with jax.named_scope("second"):
        return repeated(x + 1)


UPDATE = shape(4096, 8192), shape(8, 8192), i32(8)
LAYERS = {"layers": [{"up": shape(DIM, DIM)}] * 4, "head": shape(DIM, WIDE)}
ARGUMENTS = {
    "mlp": ({"up": shape(DIM, WIDE), "down": shape(WIDE, DIM)}, shape(ROWS, DIM)),
    "put_rows": UPDATE,
    "copied": UPDATE,
    "either": (shape(DIM, DIM), shape(dtype=jnp.bool_)),
    "stack": (LAYERS, shape(ROWS, WIDE), UPDATE[0]),
    "twice": (shape(DIM, DIM),),
}


def program(name):
    """For compile.py: return the function `name` of this file, with its arguments."""
    return globals()[name], ARGUMENTS[name], {}


@pytest.fixture(scope="module")
def reports(compile_for_h200):
    """Reports by function name, with cuBLAS."""
    traffic = {
        "batch": BATCH,
        "context": CONTEXT,
        "layers": r"params\['layers'\]\[(\d+)\]",
        "after": r"params\['head'\]",
        "inside": "layer|^jit.stack./dot_general",
    }
    cases = {name: ("pallas", {"name": name}) for name in PALLAS}
    cases |= {name: ("program", {"name": name}) for name in ARGUMENTS}
    options = {"xla_gpu_enable_triton_gemm": False}
    return compile_for_h200(__file__, cases, traffic=traffic, options=options)


@pytest.mark.parametrize("name", PALLAS)
def test_a_pallas_call_counts_what_it_touches(reports, name):
    """An operand that is updated in place is not copied."""
    *_, aliases, read, written = PALLAS[name]
    launches, num_calls = reports[name]["launches"], 2 if aliases else 1
    found = [one for one in launches if one["pallas"] == name]
    assert found == launches[:num_calls] and {one["kind"] for one in found} == {"pallas"}
    assert {(one["num_read"], one["num_written"]) for one in found} == {(read, written)}
    assert not reports[name]["large_copies"]


def test_a_gemm_reads_its_operands_and_writes_its_result(reports):
    up, silu, down = reports["mlp"]["launches"]
    weight, x, hidden = 2 * DIM * WIDE, 2 * ROWS * DIM, 2 * ROWS * WIDE
    assert (up["kind"], up["num_read"], up["num_written"]) == ("gemm", x + weight, hidden)
    assert (silu["num_read"], silu["num_written"]) == (hidden, hidden)
    assert (down["kind"], down["num_read"], down["num_written"]) == ("gemm", hidden + weight, x)
    assert set(up["parameters"]) == {"params['up']", "x"}


def test_rows_put_into_a_donated_pool_are_all_that_moves(reports):
    (put,) = reports["put_rows"]["launches"]
    rows = 8 * 8192 * 2
    assert put["num_written"] == rows and rows <= put["num_read"] <= rows + 64
    assert not reports["put_rows"]["large_copies"]


def test_a_copy_of_a_pool_is_found(reports):
    (copy,) = reports["copied"]["large_copies"]
    assert copy["num_written"] == copy["num_read"] == 4096 * 8192 * 2


def test_a_kernel_knows_its_branch(reports):
    branches = {tuple(n for _, n in one["branches"]) for one in reports["either"]["launches"]}
    assert (1,) in branches
    heavy = [one for one in reports["either"]["launches"] if one["kind"] == "gemm"]
    assert len(heavy) == 2 and all(one["branches"][0][1] == 1 for one in heavy)


def test_kernels_are_of_the_last_layer_that_they_depend_on(reports):
    launches = reports["stack"]["launches"]
    layers = [one["layer"] for one in launches if one["layer"] is not None]
    assert layers == sorted(layers) and set(layers) == {0, 1, 2, 3, 1_000_000}
    assert [layers.count(i) for i in range(4)] == [layers.count(0)] * 4
    outside = [one for one in launches if one["layer"] is None]
    assert {"before" in one["source"] for one in outside} == {True, False}


def test_a_loop_stands_where_it_is_called(reports):
    gemms = [one for one in reports["twice"]["launches"] if one["kind"] == "gemm"]
    assert [one["scope"].split("/")[1] for one in gemms] == ["first", "second"]
    assert {one["times"] for one in gemms} == {3} and not reports["twice"]["unknown_loops"]


def test_every_kernel_is_a_thunk(reports):
    """The counted kernels are those that XLA launches, in every branch."""
    for name, report in reports.items():
        around = ("kCommandBuffer", "kConditional", "kWhile", "kSequential")
        thunks = [one for one in report["thunks"] if one["kind"] not in around]
        assert len(thunks) == len(report["launches"]), name
