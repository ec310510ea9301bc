"""Small tensors are joined on the host, large ones on a device, with equal bits."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from specjax.device import loading
from specjax.device.models.registry import (
    describe_checkpoint,
    load_model,
    open_weights,
    read_config,
    stored_specs,
)
from specjax.device.placement import Placement

pytest.importorskip("compressed_tensors")
from support.quantised import folders  # noqa: E402

pytestmark = pytest.mark.slow

BF16 = np.dtype("bfloat16")


def bits(array):
    return np.asarray(array).reshape(-1).view(np.uint8)


def assert_same_bits(one, other):
    assert (one.dtype, one.shape) == (other.dtype, other.shape)
    np.testing.assert_array_equal(bits(one), bits(other))


def arrays_of(folder):
    """Return the spec and the file tensors of each kind of array in a checkpoint."""
    hf = read_config(folder)
    files, found = open_weights(folder, hf, BF16), {}
    for spec in jax.tree.leaves(stored_specs(folder, describe_checkpoint(folder, hf))):
        parts = spec.read(files.tensor)
        found.setdefault(replace(spec, names=("",) * len(parts)), parts)
    return found


@pytest.mark.parametrize(
    "kind, form",
    [
        *(("llama", "int-channel"), ("llama", "mxfp4"), ("llama", "nvfp4")),
        *(("llama", "gptq-order"), ("deepseek_v3", "fp8"), ("qwen3_moe", "awq")),
    ],
)
def test_each_kind_of_array(checkpoints, kind, form):
    found = arrays_of(folders(checkpoints, kind, form)[0])
    found = {spec: x for spec, x in found.items() if all(isinstance(y, np.ndarray) for y in x)}
    join = jax.jit(lambda given: [spec.join(x, BF16) for spec, x in zip(found, given, strict=True)])
    for (spec, parts), expected in zip(found.items(), join([*found.values()]), strict=True):
        made = spec.join(parts, BF16)
        assert isinstance(made, np.ndarray), spec
        assert_same_bits(made, expected)


def test_the_parts_of_devices(checkpoints, monkeypatch):
    """The inputs of a group are not adjacent, so that each device has some of each group."""
    folder, placement = (
        folders(checkpoints, "llama", "gptq-order")[0],
        Placement.on(*jax.devices()[:2]),
    )
    made = load_model(folder, BF16, placement)[1]
    monkeypatch.setattr(loading, "MAX_JOINED_HERE", -1)
    jax.tree.map(assert_same_bits, made, load_model(folder, BF16, placement)[1])
