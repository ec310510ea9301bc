"""Drafters' files: tensors under other names, unknown tensors, and the device of the weights."""

import jax
import numpy as np
import pytest

from specjax.checkpoint.errors import CheckpointError
from specjax.config import SpeculativeConfig
from specjax.device.drafters.registry import drafter_from_config, load_drafter
from specjax.device.models.registry import load_model
from specjax.device.placement import Placement

FP32 = np.dtype("float32")


def loaded(folder, target, method="eagle3", *, placement=None):
    """Load a head; return the drafter, its parameters and the log lines."""
    model, _ = load_model(target.folder, FP32)
    config, lines = SpeculativeConfig(method=method, model="", num_speculative_tokens=2), []
    return *load_drafter(folder, config, model, FP32, placement, log=lines.append), lines


@pytest.fixture
def rewritten(tmp_path):
    """Return a function that writes a copy of a head with other tensors."""

    def write(head, tensors):
        pytest.importorskip("safetensors.torch").save_file(tensors, tmp_path / "model.safetensors")
        (tmp_path / "config.json").write_bytes((head.folder / "config.json").read_bytes())
        return tmp_path

    return write


@pytest.mark.parametrize("prefix", ["", "model."])
def test_old_names_load_as_the_published_ones(checkpoints, prefix, rewritten):
    target = checkpoints.target()
    head = checkpoints.eagle3(target, fc_norm=True, eagle_aux_hidden_state_layer_ids=[0, 1, 2])
    old = {"fc_norm.0": "aux_norm_low", "fc_norm.1": "aux_norm_mid", "fc_norm.2": "aux_norm_high"}

    def rename(name):
        stem = name.removesuffix(".weight")
        return f"{old[stem]}.weight" if stem in old else prefix + name

    folder = rewritten(head, {rename(name): tensor for name, tensor in head.tensors.items()})
    (drafter, params, _), (again, found, _) = loaded(head.folder, target), loaded(folder, target)
    assert again == drafter and drafter.head.has_aux_norms
    jax.tree.map(np.testing.assert_array_equal, found, params)


def test_a_config_alone_gives_the_head_that_the_weights_have(checkpoints, tmp_path):
    target = checkpoints.target()
    head = checkpoints.eagle3(target, norm_before_residual=True)
    drafter, params, _ = loaded(head.folder, target)
    (tmp_path / "config.json").write_bytes((head.folder / "config.json").read_bytes())
    model, _ = load_model(target.folder, FP32)
    config = SpeculativeConfig(method="eagle3", model="", num_speculative_tokens=2)
    described, shapes = drafter_from_config(tmp_path, config, model, "float32")
    assert described == drafter
    assert jax.tree.map(np.shape, params) == jax.tree.map(lambda x: x.shape, shapes)


UNREAD = "verifier_norm.weight", "layers.0.self_attn.rotary_emb.inv_freq", "midlayer.k_scale"


@pytest.mark.parametrize(
    "options, more, words",
    [
        ({}, UNREAD, ("not used", *UNREAD)),
        ({"draft_vocab": 15}, (), ()),
        ({"draft_vocab": 15}, ("t2d",), ("t2d", "d2t")),
        (
            {"num_aux": 0, "eagle_config": {"use_aux_hidden_state": False}},
            ("fc.weight", "fc_norm.0.weight"),
            ("no auxiliary layers: fc.weight, fc_norm.0.weight",),
        ),
        ({}, ("enorm.weight",), None),
    ],
    ids=["unread", "nothing", "another-mask", "no-layers", "unknown"],
)
@pytest.mark.parametrize("prefix", ["", "model."])
def test_what_a_heads_file_holds_besides(checkpoints, rewritten, options, more, words, prefix):
    """Further tensors that cannot matter are logged.

    Tensors that may matter are refused by name.
    """
    torch = pytest.importorskip("torch")
    target = checkpoints.target(num_hidden_layers=3)
    head = checkpoints.eagle3(target, **options)
    tensors = head.tensors | {name: torch.zeros(96) for name in more}
    folder = rewritten(head, {prefix + name: tensor for name, tensor in tensors.items()})
    if words is None:
        with pytest.raises(CheckpointError, match=f"unexpected: {prefix}{more[0]}"):
            loaded(folder, target)
        return
    *_, lines = loaded(folder, target)
    (line,) = lines or [""]
    assert bool(line) == bool(words) and all(word in line for word in words), lines


@pytest.mark.parametrize("differs", [False, True])
def test_copies_in_a_module_that_differ_from_the_target(checkpoints, rewrite_tensors, differs):
    made = checkpoints.mtp(checkpoints.target("glm4_moe"))
    folder = checkpoints.copy(made.folder)

    def add(tensors):
        head = tensors["lm_head.weight"] * (0 if differs else 1)
        more = {"embed_tokens": tensors["model.embed_tokens.weight"], "shared_head.head": head}
        return tensors | {f"model.layers.2.{n}.weight": x.clone() for n, x in more.items()}

    rewrite_tensors(folder / "model.safetensors", add)
    *_, lines = loaded(folder, made, "mtp")
    message = "model.layers.2.shared_head.head.weight differs from lm_head.weight"
    assert [message in line for line in lines] == [True] * differs


@pytest.mark.parametrize("method", ["eagle", "eagle3", "mtp"])
def test_all_arrays_are_on_the_device_of_the_placement(checkpoints, method):
    target = checkpoints.target("qwen3_5" if method == "mtp" else "llama")
    options = {"draft_vocab": 15} if method == "eagle3" else {}
    head, other = getattr(checkpoints, method)(target, **options), jax.devices()[1]
    _, params, _ = loaded(head.folder, target, method, placement=Placement.on(other))
    assert {device for leaf in jax.tree.leaves(params) for device in leaf.devices()} == {other}
