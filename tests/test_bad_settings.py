"""Settings, heads and checkpoints that cannot be served are refused before any work."""

import numpy as np
import pytest

from specjax import LLM, CheckpointError, SpeculativeConfig
from specjax.device.models.registry import load_model

VOCAB = 96
SETTINGS = {"max_model_len": 64, "max_num_seqs": 2, "max_num_batched_tokens": 32}


@pytest.fixture(scope="module")
def target(checkpoints):
    return checkpoints.target("llama", num_hidden_layers=3)


@pytest.fixture(scope="module")
def head(checkpoints, target):
    return checkpoints.eagle(target)


# --- bad settings ---------------------------------------------------------------------------------


@pytest.fixture
def no_work(monkeypatch, compilations):
    """Refusals must come before weights are read and steps compiled."""

    def refuse(*_):
        raise AssertionError("work was done before the error")

    monkeypatch.setattr("specjax.serving.assembly.load_weights", refuse)
    with compilations.none_expected():
        yield


@pytest.mark.parametrize(
    "settings, words",
    [
        ({"max_model_len": 513}, ["max_model_len=513", "512"]),
        ({"max_model_len": 0}, ["max_model_len=0"]),
        ({"max_model_len": 64.0}, ["max_model_len=64.0", "integer"]),
        ({"max_model_len": "64"}, ["max_model_len='64'", "integer"]),
        ({"max_num_seqs": 0}, ["max_num_seqs=0"]),
        ({"max_num_batched_tokens": 0}, ["max_num_batched_tokens=0"]),
        ({"max_num_batched_tokens": -8}, ["max_num_batched_tokens=-8"]),
        ({"page_size": 0}, ["page_size=0"]),
        ({"page_size": 16, "num_pages": 3}, ["num_pages=3", "max_model_len=64", "4 pages"]),
        ({"num_pages": 0}, ["num_pages=0"]),
        ({"num_pages": -1}, ["num_pages=-1"]),
        ({"dtype": "float16"}, ["dtype='float16'", "bfloat16"]),
        ({"kernels": "cuda"}, ["kernels='cuda'", "reference"]),
        ({"gpu_memory_utilization": 0.0}, ["gpu_memory_utilization=0.0"]),
        ({"gpu_memory_utilization": 1.1}, ["gpu_memory_utilization=1.1"]),
        ({"seed": -(2**63) - 1}, ["seed=-9223372036854775809", "64 bits"]),
        ({"seed": 2**64}, [f"seed={2**64}", "64 bits"]),
        ({"seed": 1.0}, ["seed=1.0"]),
    ],
    ids=str,
)
@pytest.mark.usefixtures("no_work")
def test_bad_settings(target, settings, words):
    with pytest.raises(ValueError) as error:
        LLM(target.folder, verbose=False, **(SETTINGS | settings))
    assert all(word in str(error.value) for word in words), str(error.value)


@pytest.mark.usefixtures("no_work")
def test_an_empty_speculative_config(target):
    with pytest.raises(ValueError, match="lacks"):
        LLM(target.folder, speculative_config={}, verbose=False, **SETTINGS)


@pytest.mark.usefixtures("no_work")
def test_an_unknown_setting(target):
    with pytest.raises(TypeError, match="max_seqs"):
        LLM(target.folder, max_seqs=3)


@pytest.mark.parametrize(
    "fields, words",
    [
        ({"num_spec_tokens": 3}, ["unknown", "num_spec_tokens", "num_speculative_tokens"]),
        ({"method": "eagle2"}, ["method='eagle2'", "eagle3"]),
        ({"num_speculative_tokens": 0}, ["num_speculative_tokens=0"]),
        ({"num_speculative_tokens": -1}, ["num_speculative_tokens=-1"]),
        ({"num_speculative_tokens": 2.5}, ["num_speculative_tokens=2.5"]),
        ({"num_speculative_tokens": True}, ["num_speculative_tokens=True"]),
        ({"draft_sample_method": "best"}, ["draft_sample_method='best'", "greedy"]),
        ({"aux_id_convention": "x"}, ["aux_id_convention='x'", "output"]),
        ({"model": "no/such/folder"}, ["no/such/folder"]),
    ],
    ids=str,
)
@pytest.mark.usefixtures("no_work")
def test_bad_speculative_config(target, head, fields, words):
    good = {"method": "eagle", "model": str(head.folder), "num_speculative_tokens": 2}
    with pytest.raises(ValueError) as error:
        LLM(target.folder, speculative_config=good | fields, verbose=False, **SETTINGS)
    assert all(word in str(error.value) for word in words), str(error.value)


def test_speculative_config_as_a_value_or_a_mapping(head):
    fields = {"method": "eagle", "model": str(head.folder), "num_speculative_tokens": 2}
    config = SpeculativeConfig(**fields)
    assert SpeculativeConfig.of(fields) == SpeculativeConfig.of(config) == config
    for missing in fields:
        rest = {key: value for key, value in fields.items() if key != missing}
        with pytest.raises(ValueError, match=f"lacks.*{missing}"):
            SpeculativeConfig.of(rest)
    with pytest.raises(ValueError, match="lacks"):
        SpeculativeConfig.of({})


# --- bad checkpoints ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "edits, words",
    [
        ({"model_type": "gpt2"}, ["model_type='gpt2'", "llama, mistral", "qwen3"]),
        ({"model_type": None}, ["model_type=None", "llama"]),
        ({"hidden_act": "gelu"}, ["hidden_act='gelu'", "silu"]),
        ({"mlp_bias": True}, ["mlp_bias=True"]),
        ({"vocab_size": None}, ["vocab_size"]),
        ({"hidden_size": -32}, ["hidden_size", "-32"]),
        ({"rope_parameters": {"rope_type": "longrope"}}, ["'longrope'", "llama3"]),
        ({"rope_parameters": {"rope_type": "linear"}}, ["linear", "factor"]),
    ],
    ids=str,
)
@pytest.mark.usefixtures("no_work")
def test_a_config_that_is_not_supported(checkpoints, target, edits, words):
    folder = checkpoints.copy(target.folder, **edits)
    with pytest.raises(CheckpointError) as error:
        LLM(folder, verbose=False, **SETTINGS)
    assert all(word in str(error.value) for word in [str(folder), *words]), str(error.value)


def test_weights_that_do_not_fit_the_config(checkpoints, target):
    folder = checkpoints.copy(target.folder, num_hidden_layers=4, vocab_size=100)
    with pytest.raises(CheckpointError) as error:
        LLM(folder, verbose=False, **SETTINGS)
    words = ["layers.3.input_layernorm", "embed_tokens.weight (expected [100, 32], found [96, 32])"]
    assert all(word in str(error.value) for word in words), str(error.value)


def test_params_go_with_a_model_value(target):
    model, params = load_model(target.folder, np.dtype(np.float32))
    with pytest.raises(ValueError, match="params"):
        LLM(model)
    with pytest.raises(ValueError, match="params"):
        LLM(target.folder, params=params)


@pytest.mark.parametrize(
    "method, options, words",
    [
        ("eagle", {"hidden_size": 24}, ["hidden_size=24", "32"]),
        ("eagle", {"vocab_size": 90}, ["vocab_size=90", "96"]),
        ("eagle", {"num_hidden_layers": 2}, ["num_hidden_layers=2"]),
        ("eagle3", {"vocab_size": 90}, ["vocab_size=90", "96"]),
        ("eagle3", {"hidden_size": 24}, ["24", "32", "embedding"]),
        ("eagle3", {"draft_vocab_size": 40}, ["lm_head.weight", "[40, 32]"]),
        ("eagle3", {"eagle_aux_hidden_state_layer_ids": [1, 2, 4]}, ["[1, 2, 4]", "0..3"]),
        ("eagle3", {"num_aux": 2}, ["fc.weight reads 64", "3 auxiliary layers", "96", "layer_ids"]),
        ("eagle3", {"fc_norm": False, "norm_before_fc": True}, ["input_norm.weight"]),
        ("eagle3", {"draft_vocab": 40, "lm_head": False}, ["draft_vocab_size=40", "lm_head"]),
    ],
    ids=str,
)
@pytest.mark.usefixtures("no_work")
def test_a_head_that_does_not_fit_the_target(checkpoints, target, method, options, words):
    head = getattr(checkpoints, method)(target, **options)
    speculative = {"method": method, "model": str(head.folder), "num_speculative_tokens": 2}
    with pytest.raises(CheckpointError) as error:
        LLM(target.folder, speculative_config=speculative, verbose=False, **SETTINGS)
    assert all(word in str(error.value) for word in words), str(error.value)


@pytest.mark.usefixtures("no_work")
def test_a_head_of_the_other_kind(checkpoints, target, head):
    speculative = {"method": "eagle3", "model": str(head.folder), "num_speculative_tokens": 2}
    with pytest.raises(CheckpointError, match="hidden_norm"):
        LLM(target.folder, speculative_config=speculative, verbose=False, **SETTINGS)
    speculative |= {"method": "eagle", "model": str(checkpoints.eagle3(target).folder)}
    with pytest.raises(CheckpointError, match="midlayer"):
        LLM(target.folder, speculative_config=speculative, verbose=False, **SETTINGS)


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda d2t: None, ["draft_vocab_size=20", "96", "no d2t"]),
        (lambda d2t: d2t + VOCAB, ["d2t", "96"]),
        (lambda d2t: d2t - 50, ["d2t", "96"]),
        (lambda d2t: d2t.float(), ["d2t", "integers", "float32"]),
        (lambda d2t: d2t[:-1], ["d2t", "20 integers", "[19]"]),
    ],
    ids=["missing", "past-the-end", "negative", "float", "short"],
)
def test_d2t_must_be_whole_and_within_the_vocabulary(checkpoints, target, change, words):
    import safetensors.torch

    head = checkpoints.eagle3(target, draft_vocab=20)
    folder = checkpoints.copy(head.folder)
    tensors = dict(head.tensors) | {"d2t": change(head.tensors["d2t"])}
    tensors = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    safetensors.torch.save_file(tensors, folder / "model.safetensors")
    speculative = {"method": "eagle3", "model": str(folder), "num_speculative_tokens": 2}
    with pytest.raises(CheckpointError) as error:
        LLM(target.folder, speculative_config=speculative, verbose=False, **SETTINGS)
    assert all(word in str(error.value) for word in words), str(error.value)
