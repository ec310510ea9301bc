"""Steps of two H200s, compiled without a GPU: their collectives, and figures per GPU."""

from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from specjax.engine.xla_options import collective_options
from specjax.inspect.report import StepRequest, compile_steps, in_layer, part_of

CONFIGS = Path(__file__).parents[2] / "benchmarks" / "configs"
MODEL, MIXTURE = CONFIGS / "Llama-3.2-1B", CONFIGS / "Qwen3-30B-A3B"
BATCH, K, DIM, LAYERS = 8, 2, 2048, 2
ROWS, COLUMNS = 8, 512
NAMES = "auto", "graph"

pytestmark = pytest.mark.h200


def exchange(mesh):
    """For compile.py: return a sum and a gather over two devices."""

    def each(x):
        total = jax.lax.psum(x[0], "model")
        return total, jax.lax.all_gather(jnp.sin(total) + x[0], "model")

    specs = PartitionSpec("model"), PartitionSpec()
    mapped = jax.shard_map(each, mesh=mesh, in_specs=specs[0], out_specs=specs[1], check_vma=False)
    sharding = NamedSharding(AbstractMesh((2,), ("model",)), specs[0])
    x = jax.ShapeDtypeStruct((2, ROWS, COLUMNS), jnp.float32, sharding=sharding)
    return jax.jit(mapped), (x,), {}


@pytest.mark.parametrize("collectives", ["auto", "nccl"])
def test_bytes_of_collectives(compile_for_h200, collectives):
    """An all-reduce is a kernel of XLA or of NCCL. A gather is always NCCL's."""
    asked = {"options": collective_options(collectives), "mesh": ("model", 2)}
    (report,) = compile_for_h200(
        __file__, {0: ("exchange", {})}, traffic={"batch": 1, "context": 1}, **asked
    ).values()
    size = 4 * ROWS * COLUMNS
    found = {x["kind"]: (x["num_read"], x["num_written"]) for x in report["launches"]}
    assert found["all-reduce"] == (size, size) and found["all-gather"] == (size, 2 * size)
    kinds = {thunk["kind"] for thunk in report["thunks"]}
    assert ("kCollectiveKernel" in kinds) == (collectives == "auto")


@pytest.fixture(scope="module")
def reports(kept):
    """Reports of a step, by the way to exchange sums; and of a step with whole experts."""
    fields = {"model": MODEL, "batch": BATCH, "k": K, "method": "eagle", "num_layers": LAYERS}
    fields["tensor_parallel_size"] = 2
    requests = [StepRequest(**fields, collectives=name) for name in NAMES]
    experts = {"model": MIXTURE, "k": 0, "method": None, "num_layers": 1}
    requests.append(StepRequest(**fields | experts, enable_expert_parallel=True))
    made = compile_steps(requests, kept=kept)
    return dict(zip((*NAMES, "experts"), made, strict=True))


@pytest.mark.parametrize("name", NAMES)
def test_a_step(reports, name):
    """There are two sums per layer and one per embedding. Sampled rows gather token and score."""
    report = reports[name]
    (layers,) = report.layers.values()
    row, rows = 2 * DIM, BATCH * (K + 1)
    assert layers.minimum == layers.maximum
    assert [(x.kind, x.num_read) for x in layers.collectives] == [("all-reduce", rows * row)] * 2
    outside = [(part_of(x), x.kind, x.num_read) for x in report.collectives if not in_layer(x)]
    assert sorted(outside) == sorted(
        [
            *[("draft", "all-reduce", BATCH * row)] * 3 * K,  # the embedding, and a layer
            *[("draft", "all-gather", BATCH * 8)] * K,
            ("verify", "all-reduce", rows * row),
            ("settle", "all-gather", rows * 8),
            ("observe", "all-reduce", rows * row),
        ]
    )
    assert report.is_one_command_buffer == (name == "graph")
    assert not report.uncaptured_conditionals
    assert report.is_state_in_place and 1 <= report.verify.ratio < 1.08
    weights = report.memory["argument"] - report.state_bytes
    half = (LAYERS * 60_817_408 + 128256 * DIM) * 2 // 2  # of projections and embedding, in bf16
    assert half < report.minimum.weights < 1.001 * half < weights < 1.3 * half  # with EAGLE's layer


def test_a_layer_of_whole_experts(reports):
    """There are as many sums as with divided experts. Each device reads at most its 64 experts."""
    (layer,) = reports["experts"].layers.values()
    assert [(x.kind, x.num_read) for x in layer.collectives] == [
        ("all-reduce", BATCH * 2 * DIM)
    ] * 2
    inner, outer = 2 * 64 * DIM * 2 * 768, 2 * 64 * 768 * DIM
    read = [x.num_read for x in layer.kernels if x.pallas == "grouped_matmul"]
    assert len(read) == 2 and inner < read[0] < 1.01 * inner and outer < read[1] < 1.01 * outer
