"""Kernels give the same bits in any order of programs, and have no races between threads.

Each kernel must have an entry in `OPERATIONS`.
"""

import ast
import contextlib
import math
import re
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from support import kernels_delta_rule
from support.kernel_operations import OPERATIONS
from support.race_checker import ORDERS

import pallas_kernels
from pallas_kernels import triton_call
from pallas_kernels.draw_tokens import draw_tokens
from pallas_kernels.gated_delta_rule.triton import step
from pallas_kernels.route import Rule, route
from pallas_kernels.truncation import truncate

pytestmark = pytest.mark.every_jax

PACKAGE = Path(pallas_kernels.__file__).parent
FOLDERS = sorted(path.parent for path in PACKAGE.glob("*/reference.py"))


def kernels_of(folder: Path) -> list[str]:
    """Return the names of all kernel functions in a folder."""
    trees = [ast.parse(path.read_text()) for path in folder.rglob("*.py")]
    functions = [
        one for tree in trees for one in ast.walk(tree) if isinstance(one, ast.FunctionDef)
    ]
    return [one.name for one in functions if one.name.endswith("_kernel")]


@pytest.mark.slow
@pytest.mark.parametrize("folder", FOLDERS, ids=[folder.name for folder in FOLDERS])
def test_any_order_gives_the_same_bits_and_no_race(folder, checker):
    for name in (name for name in OPERATIONS if name.partition("/")[0] == folder.name):
        made = []
        for checker.current_order in ORDERS:
            made.append([np.asarray(x) for x in jax.tree.leaves(OPERATIONS[name]("triton")())])
        assert not checker.faults
        wanted = jax.tree.leaves(OPERATIONS[name]("reference")())
        for ours, *others, plain in zip(*made, wanted, strict=True):
            assert len({np.ascontiguousarray(x).tobytes() for x in (ours, *others)}) == 1
            assert ours.dtype == plain.dtype
            tolerance = 2e-2 if ours.dtype == jnp.bfloat16 else 2e-5
            ours, plain = (np.asarray(x, np.float32) for x in (ours, plain))
            np.testing.assert_allclose(ours, plain, rtol=tolerance, atol=tolerance)
    launched = {re.sub(r"_window_\d+", "", kernel) for kernel in checker.launched}
    assert len(launched) == len(kernels_of(folder)), "a kernel lacks a line in OPERATIONS"


def edit_kernels(found, instead, patch):
    """Replace a pattern in the text of all kernels from now on."""
    plain = triton_call.triton_source

    def edited(*args, **kwargs):
        return re.sub(found, instead, plain(*args, **kwargs))

    patch.setattr(triton_call, "triton_source", edited)


without_masks = partial(edit_kernels, r"(tl\.store\(.*), mask=\w+", r"\1")
of_two_programs = partial(edit_kernels, r"tl.program_id\(0\)", "(tl.program_id(0) // 2)")


def without_barriers(patch):
    patch.setattr(step, "barrier", lambda states: states)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, plant, sentence",
    [
        ("grouped_matmul", without_masks, "is out of bounds"),
        ("scaled_matmul", of_two_programs, "writes what another one writes"),
        (
            "gated_delta_rule/few",
            without_barriers,
            "writes what it read, with no barrier between",
        ),
    ],
)
def test_a_fault_in_a_kernel_is_found(name, plant, sentence, checker, monkeypatch):
    plant(monkeypatch)
    with contextlib.suppress(AssertionError):  # the operation's own, of wrong results
        jax.block_until_ready(OPERATIONS[name]("triton")())
    assert sentence in {found for _, found in checker.faults}


@pytest.fixture
def permuted(monkeypatch):
    """Run interpreted programs in another order, as if each had another place. Yield grid sizes."""
    call, program_id, grids = pl.pallas_call, pl.program_id, []

    def pallas_call(kernel, *, grid, **options):
        number = math.prod(grid)
        step = next(i for i in range(number // 2 + 1, 2 * number + 2) if math.gcd(i, number) == 1)
        grids.append(number)

        def at_another_place(*refs):
            place = jnp.unravel_index((step * program_id(0) + number // 3) % number, grid)
            with monkeypatch.context() as patch:
                patch.setattr(pl, "program_id", place.__getitem__)
                patch.setattr(pl, "num_programs", grid.__getitem__)
                kernel(*refs)

        return call(at_another_place, grid=(number,), **options)

    monkeypatch.setattr(pl, "pallas_call", pallas_call)
    return grids


@pytest.mark.nightly
@pytest.mark.parametrize("name", OPERATIONS)
def test_interpreted_in_another_order_all_bits_are_the_same(name, request):
    made = []
    for permuted in False, True:
        grids = request.getfixturevalue("permuted") if permuted else [0]
        kernels_delta_rule.rule.clear_cache()
        made.append([np.asarray(x) for x in jax.tree.leaves(OPERATIONS[name]("interpret")())])
        assert grids
    kernels_delta_rule.rule.clear_cache()
    for ours, other in zip(*made, strict=True):
        assert (ours.dtype, ours.tobytes()) == (other.dtype, other.tobytes())


def nan_rows(*shape):
    """Return four rows: NaN, -NaN, NaN except for one number, and numbers except for one NaN."""
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(4, *shape)).astype(np.float32)
    logits[0], logits[1], logits[2, :-1], logits[3, 0] = np.nan, -np.nan, np.nan, np.nan
    return logits


@pytest.mark.slow
@pytest.mark.parametrize("rest", [1, 5, 31, 32, 33, 4095])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_rows_with_nan_have_no_token(rest, temperature, checker):
    """A tile's maximum ignores NaN, so it may be the value of lanes past the end of the row."""
    vocab_size, index = 4096 + rest, np.arange(4, dtype=np.int32)
    logits = nan_rows(vocab_size)
    temperatures, seeds = np.full(4, temperature, np.float32), index.astype(np.uint32)
    given = logits, temperatures, seeds, 0, (index,)
    tokens = np.asarray(draw_tokens(*given, kernels="triton"))
    assert not checker.faults and np.all(tokens == -1)


@pytest.mark.slow
@pytest.mark.parametrize("num_numbers", [1, 400, 899])  # more or fewer NaN than candidates fit
@pytest.mark.parametrize("top_k, top_p", [(0, 0.9), (1, 1.0), (40, 0.9)])
def test_truncation_of_nan_makes_up_no_logit(top_k, top_p, num_numbers, checker):
    """In particular, excluded tokens, like the first one here, must not come back."""
    logits = nan_rows(900)
    logits[2:, :num_numbers], logits[2:, num_numbers:] = logits[3, 1:][:num_numbers], np.nan
    logits[:, 0], ones = -np.inf, np.ones(4, np.float32)
    asked = ones, np.full(4, top_k, np.int32), top_p * ones, 0 * ones
    left = np.asarray(truncate(logits, *asked, kernels="triton"))
    assert not checker.faults
    assert np.all((left == -np.inf) | (left == logits) | np.isnan(left) & np.isnan(logits))


@pytest.mark.parametrize("dtype, is_sigmoid", [("bfloat16", False), ("float32", True)])
def test_routes_of_nan_are_experts_that_there_are(dtype, is_sigmoid, checker):
    logits = nan_rows(24).astype(jnp.dtype(dtype))
    made = route(logits, 4, Rule(is_sigmoid=is_sigmoid), kernels="triton")
    experts = np.asarray(made.experts)
    assert not checker.faults and np.all((experts >= 0) & (experts < 24))
    assert all(len(set(row)) == 4 for row in experts)
    np.testing.assert_array_equal(np.sort(made.order), np.arange(experts.size))
