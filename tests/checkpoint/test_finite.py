"""Every NaN and infinity is found, in every dtype of weights, on the host and on a device."""

import jax
import ml_dtypes
import numpy as np
import pytest

from specjax.checkpoint import finite
from specjax.checkpoint.finite import all_finite

FLOATS = [np.float16, ml_dtypes.bfloat16, np.float32, np.float64]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("size", [7, 2**18, 2**18 + 3])
def test_a_single_bad_value_is_found(dtype, size):
    rng = np.random.default_rng(0)
    array = rng.standard_normal(size).astype(dtype)
    array[0], array[1] = ml_dtypes.finfo(dtype).max, ml_dtypes.finfo(dtype).min
    assert all_finite(array)
    for bad in np.nan, -np.nan, np.inf, -np.inf:
        for place in 0, size - 1:
            spoiled = array.copy()
            spoiled[place] = bad
            assert not all_finite(spoiled)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("is_near", [True, False])
def test_values_that_become_infinite_in_another_dtype(dtype, is_near, monkeypatch):
    monkeypatch.setattr(finite, "_is_near", lambda _: is_near)
    largest = float(ml_dtypes.finfo(ml_dtypes.bfloat16).max)
    for sign in 1, -1:
        array = np.full(3, sign * largest, dtype)
        above = np.nextafter(array, dtype(sign * np.inf))
        for given in (array, jax.device_put(array)) if dtype == np.float32 else (array,):
            assert all_finite(given, np.dtype(ml_dtypes.bfloat16))
        for given in (above, jax.device_put(above)) if dtype == np.float32 else (above,):
            assert not all_finite(given, np.dtype(ml_dtypes.bfloat16)) and all_finite(given)


@pytest.mark.parametrize("dtype", [*FLOATS[:3], ml_dtypes.float8_e4m3fn])
def test_an_array_on_a_device_is_looked_at_there(dtype, monkeypatch):
    array = np.ones((3, 5), dtype)
    array[2, 4] = np.nan
    for is_near in True, False:
        monkeypatch.setattr(finite, "_is_near", lambda _, is_near=is_near: is_near)
        assert not all_finite(jax.device_put(array)) and all_finite(jax.device_put(array[:2]))


def test_what_is_not_a_weight_is_finite():
    assert all_finite(np.array([-1, 2**31 - 1], np.int32)) and all_finite(np.zeros((0, 4)))
