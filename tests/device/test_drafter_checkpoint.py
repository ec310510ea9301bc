"""Names that drafters' files use for the same tensors."""

import jax
import numpy as np
import pytest

from specjax.config import SpeculativeConfig
from specjax.device.drafters.registry import load_drafter
from specjax.device.models.registry import load_model

FP32 = np.dtype("float32")


@pytest.mark.parametrize("prefix", ["", "model."])
def test_old_names_load_as_the_published_ones(checkpoints, prefix, tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    target = checkpoints.target()
    head = checkpoints.eagle3(target, fc_norm=True, eagle_aux_hidden_state_layer_ids=[0, 1, 2])
    old = {"fc_norm.0": "aux_norm_low", "fc_norm.1": "aux_norm_mid", "fc_norm.2": "aux_norm_high"}

    def rename(name):
        stem = name.removesuffix(".weight")
        return f"{old[stem]}.weight" if stem in old else prefix + name

    renamed = {rename(name): tensor for name, tensor in head.tensors.items()}
    safetensors.save_file(renamed, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((head.folder / "config.json").read_bytes())
    model, _ = load_model(target.folder, FP32)
    config = SpeculativeConfig(method="eagle3", model="", num_speculative_tokens=2)
    drafter, params = load_drafter(head.folder, config, model, FP32)
    again, loaded = load_drafter(tmp_path, config, model, FP32)
    assert again == drafter and drafter.head.has_aux_norms
    jax.tree.map(np.testing.assert_array_equal, loaded, params)
