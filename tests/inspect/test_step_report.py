"""A small model's decode step through `compile_steps`: parts, layers, bytes, state."""

import json

import pytest

from specjax.engine.variants import FEW_LOGPROBS
from specjax.inspect.report import StepRequest, compile_steps, part_of

pytestmark = pytest.mark.h200

CONFIG = {
    "model_type": "llama",
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_hidden_layers": 5,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 4096,
    "vocab_size": 32768,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
LAYERS = 4


@pytest.fixture(scope="module")
def reports(compile_for_h200, tmp_path_factory):
    """By K: drafts with a head of the model's own shape, and none."""
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    sizes = {"model": folder, "batch": 8, "context": 256, "num_layers": LAYERS, "gemm": "cublas"}
    requests = StepRequest(k=0, **sizes), StepRequest(k=2, method="eagle", **sizes)
    return dict(zip((0, 2), compile_steps(requests), strict=True))


def test_the_state_is_updated_in_place(reports):
    for k, report in reports.items():
        assert report.is_state_in_place
        # Tokens, and room for their log-probabilities.
        most = 4 * report.request.batch * (k + 1) * (3 + 2 * FEW_LOGPROBS) + 2**12
        assert report.memory["output"] - report.memory["alias"] < most, k


def test_parts_add_up(reports):
    for k, report in reports.items():
        counts = dict(report.num_launches)
        assert counts.pop("step") == sum(counts.values()) == sum(x.times for x in report.taken)
        assert (counts["draft"] > 20) == (counts["observe"] > 2) == (k > 0)
        assert 3 < counts["settle"] < 8 and counts["other"] < 10
        assert report.num_layers == CONFIG["num_hidden_layers"]


def test_layers_are_alike(reports):
    for report in reports.values():
        layers = report.layers["full_attention"]
        assert layers.num_layers == LAYERS and layers.maximum - layers.minimum <= 1
        read = {name.partition("].")[2] for one in layers.kernels for name in one.parameters}
        matrices = "attention.qkv", "attention.out", "mlp.gate_up", "mlp.down"
        assert set(matrices) <= read
        products = [one for one in layers.kernels if one.kind == "gemm" and one.parameters]
        assert len(products) == len(matrices)


def test_every_weight_is_read_once_by_the_target(reports):
    """And by each draft, its head's and the model's."""
    dim, inner, vocab = (CONFIG[f"{name}_size"] for name in ("hidden", "intermediate", "vocab"))
    sizes = {"attention.qkv": dim * dim * 2, "mlp.down": inner * dim}
    for k, report in reports.items():
        products = [one for one in report.taken if one.kind == "gemm"]
        for name, size in sizes.items():
            mine = [
                one
                for one in products
                if any("target" in x and x.endswith(name) for x in one.parameters)
            ]
            assert len(mine) == LAYERS and all(part_of(one) == "verify" for one in mine)
            assert all(2 * size <= one.num_read < 2.2 * size for one in mine)
        heads = [one for one in products if "params.target.lm_head" in one.parameters]
        assert [part_of(one) for one in heads] == ["draft"] * k + ["verify"]
        assert all(one.num_read >= 2 * dim * vocab for one in heads)
        fc = [one for one in products if "params.drafter.fc" in one.parameters]
        assert [part_of(one) for one in fc] == (["draft"] * k + ["observe"]) * (k > 0)
