"""A trainer's weights on half of the devices update an engine on the other half."""

import re

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from safetensors.numpy import load_file
from support.engines import SIZES, simulated_engines
from support.simulated_device import SimulatedPrograms

from specjax.checkpoint.division import DividedSpec, divide, even
from specjax.checkpoint.spec import TensorSpec, projection, stored
from specjax.device.loading import _join_afar, lay_out, lay_out_whole
from specjax.device.models.registry import load_model
from specjax.device.placement import DIVIDED, REPLICATED, Placement
from specjax.rl import RolloutEngine

FLOAT32 = np.dtype(np.float32)
UNEVEN = {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 3}


@pytest.fixture
def no_host(monkeypatch):
    """Fail if arrays of several devices are read (except checksums), or arrays of one are cut."""
    # A simulated device would look at its weights.
    keep = property(
        lambda self: self._params, lambda self, params: setattr(self, "_params", params)
    )
    monkeypatch.setattr(SimulatedPrograms, "params", keep)
    array = type(jax.numpy.zeros(()))
    read = array._value

    def value(self):
        # No assertion: its message would read the array again.
        if self.size > 2 and len(self.sharding.device_set) > 1:
            raise RuntimeError("it passes through the host")
        return read.fget(self)

    monkeypatch.setattr(array, "_value", property(value))
    # JAX does not notice that NumPy reads an array of one CPU device.
    split = TensorSpec.split
    monkeypatch.setattr(TensorSpec, "split", lambda spec, x: split(spec, as_traced(x)))
    with jax.transfer_guard_device_to_host("disallow"):
        yield


def as_traced(x):
    if not isinstance(x, jax.core.Tracer):
        raise RuntimeError("the host divides it")
    return x


def trainers_mesh(*shape, kind=jax.sharding.AxisType.Auto):
    devices = np.array(jax.devices()[2:]).reshape(shape)
    names = ("fsdp", "tensor")[: len(shape)]
    return Mesh(devices, names, axis_types=(kind,) * len(shape))


def as_of_a_trainer(x, mesh, axis):
    """Divide an array along an axis, if the size is even; otherwise, replicate it."""
    axis = min(axis, max(x.ndim - 1, 0))
    is_even = x.ndim and x.shape[axis] % 2 == 0
    spec = PartitionSpec(*[None] * axis, mesh.axis_names) if is_even else PartitionSpec()
    return jax.device_put(x, NamedSharding(mesh, spec))


CASES = [
    ("llama", UNEVEN, {"tensor_parallel_size": 2}),
    ("qwen3_moe", {}, {"tensor_parallel_size": 2, "enable_expert_parallel": True}),
    ("qwen3_next", {}, {"tensor_parallel_size": 2}),
    ("llama", UNEVEN, {}),
    ("llama", {}, {"data_parallel_size": 2}),
]


@pytest.mark.slow
@pytest.mark.parametrize("kind, config, options", CASES)
def test_a_trainers_arrays_reach_the_engine_without_the_host(
    checkpoints, kind, config, options, request
):
    folder = checkpoints.target(kind, **config).folder
    new = {
        name: x * 1.5 if x.dtype == FLOAT32 else x
        for name, x in load_file(folder / "model.safetensors").items()
    }
    with simulated_engines(), RolloutEngine(folder, **SIZES, **options) as engine:
        original = engine.checksum()
        engine.update_weights(new)
        expected = engine.checksum()
        homes = jax.tree.map(lambda x: x.sharding, engine.params.target)
        explicit = trainers_mesh(2, kind=jax.sharding.AxisType.Explicit)
        given = [
            {name: as_of_a_trainer(x, mesh, axis) for name, x in new.items()}
            for mesh, axis in [(trainers_mesh(2), 0), (explicit, 1), (trainers_mesh(1, 2), 0)]
        ]
        whole = load_model(folder, FLOAT32)[1]
        back = jax.tree.map(lambda x: as_of_a_trainer(x, trainers_mesh(2), 0), whole)
        copies = jax.tree.map(lambda x: x + 0, back)
        alone = jax.device_put(whole, jax.devices()[3])
        request.getfixturevalue("no_host")
        for weights in given:
            engine.update_weights(weights)
            assert jax.tree.map(lambda x: x.sharding, engine.params.target) == homes
            assert engine.checksum() == expected
            engine.update_weights(back)  # by path
            assert engine.checksum() == original
        jax.tree.map(lambda x: x.delete(), back)  # the engine has its own memory
        engine.update_weights(copies)
        assert engine.checksum() == original
        engine.update_weights(given[0])
        engine.update_weights(alone)
        assert engine.checksum() == original


def test_nothing_is_whole_on_a_device_that_needs_a_part():
    """The trainer's devices exchange only parts, and a device of the engine gets only its part."""
    columns = (("h", 48), ("k", 16), ("k", 16))
    whole = projection(("q", "k", "v"), 32, (48, 16, 16), columns=columns)
    local = projection(("q", "k", "v"), 32, (24, 8, 8), columns=columns)
    rows = [projection(("o",), size, (48,), rows="h") for size in (64, 32)]
    for one, part in [(whole, local), rows]:
        spec = divide(one, part, {"h": even(4, 2), "k": even(2, 2)}, 2)
        assert isinstance(spec, DividedSpec)
        for axis in 0, 1:
            parts = [
                as_of_a_trainer(np.zeros(shape, FLOAT32), trainers_mesh(2), axis)
                for shape in one.file_shapes
            ]
            devices = tuple(jax.devices()[2:])
            program = _join_afar(spec, FLOAT32, devices).lower(parts).compile()
            assert not re.search(r"all-gather|all-reduce", program.as_text())
            assert program.memory_analysis().output_size_in_bytes == 4 * np.prod(part.shape)


def test_any_number_of_devices_takes_from_any_other(no_host):
    spec = divide(*[stored(("x",), (n,), rows="h") for n in (12, 4)], {"h": even(12, 3)}, 3)
    one = divide(*[stored(("x",), (12,))] * 2, {}, 3)
    given = jax.device_put(
        np.arange(12.0, dtype=FLOAT32), NamedSharding(trainers_mesh(2), PartitionSpec("fsdp"))
    )
    engine = Placement.on(*jax.devices()[:3])  # the last is the trainer's as well
    for each, place, shape in [(spec, DIVIDED, (3, 4)), (one, REPLICATED, (12,))]:
        made = lay_out([given], each, FLOAT32, engine.sharding(place))
        assert made.sharding == engine.sharding(place)
        for shard in made.addressable_shards:
            wanted = np.arange(12.0).reshape(shape)[shard.index]
            np.testing.assert_array_equal(np.asarray(shard.data), wanted)
        if each is spec:  # the tree of another engine
            home = Placement.on(*jax.devices()[1:]).sharding(place)
            again = lay_out_whole(jax.device_put(made, home), spec, FLOAT32, made.sharding)
            assert again.sharding == made.sharding
            for shard, other in zip(made.addressable_shards, again.addressable_shards, strict=True):
                np.testing.assert_array_equal(np.asarray(shard.data), np.asarray(other.data))
