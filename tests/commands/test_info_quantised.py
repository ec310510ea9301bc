"""Sizes of quantised models computed from configs alone, compared with the models' weights."""

import json
import re

import pytest

from specjax.cli import main

torch = pytest.importorskip("torch")
pytest.importorskip("compressed_tensors")
from support.quantised import FORMS  # noqa: E402

pytestmark = pytest.mark.slow

WIDE = {"hidden_size": 128, "intermediate_size": 192}
QUANTISED = re.compile(r"layers.*(q|v|o|gate|up|down)_proj\.weight$")
PLAIN = re.compile(r"k_proj\.weight$")


def weights_in(folder, capsys, *options):
    assert main(["info", str(folder), "--json", *options]) == 0
    return json.loads(capsys.readouterr().out)["weights"]


def without_weights(checkpoints, folder):
    made = checkpoints.copy(folder)
    (made / "model.safetensors").unlink()
    return made


@pytest.mark.parametrize("form", FORMS)
def test_a_config_tells_the_bytes(checkpoints, rewrite_tensors, capsys, form):
    """The config names quantised or ignored matrices, in the way of each format."""
    config = dict(FORMS[form].config)
    if config["quant_method"] == "modelopt":
        config["ignore"] = ["lm_head"]
    target = checkpoints.target("llama", **WIDE).folder
    folder = checkpoints.copy(target, quantization_config=config)
    ignores_keys = config["quant_method"] == "compressed-tensors"

    def quantise(tensors):
        made = dict(tensors)
        for name, tensor in tensors.items():
            is_named = QUANTISED.search(name) or (PLAIN.search(name) and not ignores_keys)
            if is_named and (written := FORMS[form].write(tensor.float())):
                del made[name]
                made |= {name.removesuffix("weight") + end: x for end, x in written[0].items()}
        return made

    rewrite_tensors(folder / "model.safetensors", quantise)
    found = weights_in(folder, capsys)
    described = weights_in(without_weights(checkpoints, folder), capsys)
    assert described["loaded_bytes"] == found["loaded_bytes"]
    plain = weights_in(target, capsys)["loaded_bytes"]
    assert found["loaded_bytes"]["float32"] < 0.7 * plain["float32"]


@pytest.mark.parametrize(
    "kind, config",
    [
        ("qwen3_moe", {"quant_method": "fp8", "weight_block_size": [8, 8]}),
        ("gpt_oss", {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.mlp.x"]}),
    ],
)
def test_experts_of_a_config(checkpoints, capsys, kind, config):
    """Experts take a byte or half a byte per weight, and their scales."""
    target = checkpoints.target(kind).folder
    plain = weights_in(target, capsys)["loaded_bytes"]
    folder = without_weights(checkpoints, checkpoints.copy(target, quantization_config=config))
    found = weights_in(folder, capsys)["loaded_bytes"]
    assert 0.2 * plain["float32"] < found["float32"] < 0.75 * plain["float32"]


@pytest.mark.parametrize("kind", ["llama", "qwen3_next"])
def test_quantization_is_counted_with_and_without_weights(checkpoints, capsys, kind):
    target = checkpoints.target(kind, **(WIDE if kind == "llama" else {})).folder
    bare = without_weights(checkpoints, target)
    sizes = []
    for bits in ("fp8", "int8") if kind != "llama" else ("fp8", "int8", "int4"):
        each = [weights_in(one, capsys, "--quantization", bits) for one in (target, bare)]
        each.append(weights_in(bare / "config.json", capsys, "--quantization", bits))
        assert each[0]["loaded_bytes"] == each[1]["loaded_bytes"] == each[2]["loaded_bytes"]
        sizes.append(each[0]["loaded_bytes"]["bfloat16"])
    assert sizes[0] == sizes[1] < weights_in(target, capsys)["loaded_bytes"]["bfloat16"]
    quantised = checkpoints.copy(bare, quantization_config=FORMS["awq"].config)
    assert main(["info", str(quantised), "--quantization", "fp8"]) == 2
    assert "quantised already" in capsys.readouterr().err


WEIGHTS = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group"}


@pytest.mark.parametrize(
    "weights, ignore",
    [
        (WEIGHTS, []),
        (WEIGHTS | {"group_size": None}, None),
        (WEIGHTS | {"group_size": 32}, "lm_head"),
        (WEIGHTS | {"group_size": 32}, ["re:("]),
        ({"num_bits": 8, "type": "float", "strategy": "block"}, [3]),
    ],
)
def test_configs_that_leave_things_open(checkpoints, capsys, weights, ignore):
    """Weights whose quantisation the config does not fully describe count as plain."""
    group = {"targets": ["Linear"], "weights": weights}
    config = {"quant_method": "compressed-tensors", "config_groups": {"g": group}, "ignore": ignore}
    target = checkpoints.target("llama", **WIDE).folder
    folder = checkpoints.copy(target, quantization_config=config)
    plain = weights_in(target, capsys)["loaded_bytes"]["float32"]
    found = weights_in(without_weights(checkpoints, folder), capsys)["loaded_bytes"]["float32"]
    assert (found < plain) == ("group_size" in weights and weights["group_size"] == 32)
