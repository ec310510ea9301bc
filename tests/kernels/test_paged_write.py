"""Every implementation of the page write against a loop over its rows, bit for bit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.paged_write import IMPLEMENTATIONS, paged_write

NUM_LAYERS, NUM_PAGES, NUM_COLUMNS = 2, 24, 5


@pytest.fixture(params=IMPLEMENTATIONS)
def write(request):
    """One implementation, compiled."""

    def run(*arguments):
        return paged_write(*arguments, kernels=request.param)

    return jax.jit(run)


def arguments(starts, counts, num_rows, *, page_size=16, num_kv_heads=2, dim=64, dtype="float32"):
    """kv, layer, page_table, positions, k, v; the pool is full of numbers."""
    rng = np.random.default_rng(num_rows)
    batch = len(starts)
    kv = rng.normal(size=(NUM_LAYERS, NUM_PAGES, page_size, 2, num_kv_heads, dim))
    page_table = rng.permutation(NUM_PAGES)[: batch * NUM_COLUMNS].reshape(batch, NUM_COLUMNS)
    row = np.arange(num_rows)[None]
    positions = np.where(
        row < np.array(counts)[:, None], np.array(starts)[:, None] + row, -1
    ).astype(np.int32)
    k, v = rng.normal(size=(2, batch, num_rows, num_kv_heads, dim))
    return (
        jnp.asarray(kv, dtype),
        jnp.int32(1),
        jnp.asarray(page_table, jnp.int32),
        jnp.asarray(positions),
        jnp.asarray(k, jnp.float32),
        jnp.asarray(v, jnp.float32),
    )


def write_by_definition(kv, layer, page_table, positions, k, v):
    """The equation, one row at a time."""
    dtype, page_size = kv.dtype, kv.shape[2]
    kv, page_table, positions = (np.array(x) for x in (kv, page_table, positions))
    k, v = (np.asarray(x.astype(dtype)) for x in (k, v))
    for b, t in np.argwhere(positions >= 0):
        column, offset = divmod(int(positions[b, t]), page_size)
        page = page_table[b, column] if column < page_table.shape[1] else -1
        if page >= 0:
            kv[layer, page, offset] = k[b, t], v[b, t]
    return kv


def bits(x):
    x = np.asarray(x)
    return x.view(np.uint16 if x.dtype.itemsize == 2 else np.uint32)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("page_size", [16, 32])
@pytest.mark.parametrize("num_rows", [1, 2, 4, 16, 40])
def test_matches_the_equation(write, num_rows, page_size, dtype):
    starts, counts = (0, 15, 31, 17), (num_rows, max(0, num_rows - 1), num_rows // 2, num_rows)
    inputs = arguments(starts, counts, num_rows, page_size=page_size, dtype=dtype)
    out = write(*inputs)
    assert out.dtype == inputs[0].dtype
    np.testing.assert_array_equal(bits(out), bits(write_by_definition(*inputs)))


@pytest.mark.parametrize("num_kv_heads, dim", [(1, 128), (8, 64)])
def test_any_width_of_a_row(write, num_kv_heads, dim):
    inputs = arguments((3, 30), (4, 4), 4, num_kv_heads=num_kv_heads, dim=dim)
    np.testing.assert_array_equal(bits(write(*inputs)), bits(write_by_definition(*inputs)))


def test_pages_that_are_not_assigned_and_positions_past_the_table_write_nothing(write):
    kv, layer, page_table, positions, k, v = arguments((14, 78, 200), (4, 4, 4), 4)
    page_table = page_table.at[0, 1].set(-1)
    inputs = kv, layer, page_table, positions, k, v
    out = write(*inputs)
    np.testing.assert_array_equal(bits(out), bits(write_by_definition(*inputs)))
    changed = (bits(out) != bits(kv)).any(axis=(3, 4, 5))
    assert changed.sum() == 4  # positions 14, 15 of the first request and 78, 79 of the second


def test_a_step_without_rows_changes_nothing(write):
    inputs = arguments((3, 4), (0, 0), 2)
    np.testing.assert_array_equal(bits(write(*inputs)), bits(inputs[0]))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_donated_pool_is_updated_in_place(implementation):
    kv, *rest = arguments((3, 4), (2, 2), 2)
    expected = write_by_definition(kv, *rest)
    run = jax.jit(lambda *a: paged_write(*a, kernels=implementation), donate_argnums=0)
    address = kv.unsafe_buffer_pointer()
    out = run(kv, *rest)
    assert kv.is_deleted() and out.unsafe_buffer_pointer() == address
    np.testing.assert_array_equal(bits(out), bits(expected))


@pytest.mark.parametrize(
    "name, change",
    [
        ("kv", {"kv": (8, 16, 2, 2, 64)}),
        ("kv", {"kv": (2, 8, 16, 3, 2, 64)}),
        ("page_table", {"page_table": (1, 5)}),
        ("page_table", {"page_table": (2,)}),
        ("positions", {"positions": (3,)}),
        ("k and v", {"k": (2, 4, 2, 64)}),
        ("k and v", {"v": (2, 3, 1, 64)}),
        ("k and v", {"k": (2, 3, 2, 32), "v": (2, 3, 2, 32)}),
    ],
)
def test_shapes_that_do_not_fit_are_named(name, change):
    shapes = {
        "kv": (2, 8, 16, 2, 2, 64),
        "page_table": (2, 5),
        "positions": (2, 3),
        "k": (2, 3, 2, 64),
        "v": (2, 3, 2, 64),
    } | change
    kv, k, v = (jnp.zeros(shapes[n]) for n in ("kv", "k", "v"))
    page_table, positions = (jnp.zeros(shapes[n], int) for n in ("page_table", "positions"))
    with pytest.raises(ValueError, match=f"^{name} must be"):
        paged_write(kv, jnp.int32(0), page_table, positions, k, v)


def test_kernels_that_do_not_exist_are_named():
    with pytest.raises(ValueError, match="paged_write has no such implementation; it has ref"):
        paged_write(*arguments((0,), (1,), 1), kernels="triton")
