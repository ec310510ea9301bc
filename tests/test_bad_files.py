"""Missing, damaged or unsuitable checkpoint files are refused; errors name file and fault.

Engines are simulated, because all checks come before weights are read, or while they are read.
"""

import json
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy as safetensors
from support.refusals import label
from support.texts import VOCAB, simulated_llm

from specjax import CheckpointError

NORM = "model.norm.weight"
WEIGHTS = "model.safetensors"
INDEX = f"{WEIGHTS}.index.json"


@pytest.fixture(scope="module")
def target(checkpoints):
    return checkpoints.target("llama", tie_word_embeddings=True, eos_token_id=VOCAB - 1)


@pytest.fixture(scope="module")
def heads(checkpoints, target):
    """The folders of heads for the target, by method."""
    return {"eagle": checkpoints.eagle(target).folder, "eagle3": checkpoints.eagle3(target).folder}


@pytest.fixture
def no_weights(monkeypatch):
    monkeypatch.setattr(
        "specjax.serving.assembly.load_weights", lambda *_: pytest.fail("weights were read")
    )


def refused(folder: Path | str, *words: str, **options) -> None:
    """Check that loading fails, and that the error has all `words`."""
    with pytest.raises(CheckpointError) as error:
        simulated_llm(folder, **options)
    text = str(error.value)
    assert all(word in text for word in words), text


def write(folder: Path, name: str, content: str | bytes) -> None:
    (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())


def change_tensors(folder: Path, change: Callable[[dict[str, np.ndarray]], object]) -> None:
    tensors = {name: np.array(x) for name, x in safetensors.load_file(folder / WEIGHTS).items()}
    change(tensors)
    safetensors.save_file(tensors, folder / WEIGHTS)


SETTINGS, DEFAULTS = "tokenizer_config.json", "generation_config.json"
NO_TOKENIZER = "", "{}", "[]", b"\xff", '{"model": 5}'
BAD_FILES = [
    *(("config.json", text, "is damaged") for text in ("", "{", "[]", "5", b"\xff\xfe")),
    *(("tokenizer.json", text, "is not a tokenizer") for text in NO_TOKENIZER),
    *((SETTINGS, text, "is damaged") for text in ("", "[]", b"\xff")),
    *((SETTINGS, f'{{"chat_template": {x}}}', "chat_template=") for x in ("5", '[{"name": "a"}]')),
    (SETTINGS, '{"bos_token": {"id": 1}}', "bos_token={'id': 1}"),
    ("chat_template.jinja", b"\xff\xfe", "cannot be read"),
    *((DEFAULTS, text, "is damaged") for text in ("", "[]")),
    *((DEFAULTS, f'{{"eos_token_id": {x}}}', "eos_token_id") for x in ('"x"', "1.5", '[1, "a"]')),
    *((DEFAULTS, f'{{"eos_token_id": {x}}}', "eos_token_id") for x in ("-1", "true", 2**31)),
    (DEFAULTS, f'{{"eos_token_id": {[*range(9)]}}}', "at most 8"),
    (DEFAULTS, '{"temperature": "hot"}', "temperature='hot'"),
    (WEIGHTS, b"", "is damaged"),
    (WEIGHTS, b"<!DOCTYPE html>" + b" " * 400, "is damaged"),
    (WEIGHTS, b"version https://git-lfs.github.com/spec/v1", "git lfs pull"),
]


@pytest.mark.parametrize(
    "name, content, word", [pytest.param(*one, id=label(one[:2])) for one in BAD_FILES]
)
def test_a_damaged_file(checkpoints, letters, name, content, word):
    made = checkpoints.copy(letters)
    write(made, name, content)
    refused(made, str(made / name), word)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "chat_template.jinja", WEIGHTS])
def test_a_folder_in_a_files_place(checkpoints, letters, name):
    made = checkpoints.copy(letters)
    (made / name).unlink(missing_ok=True)
    (made / name).mkdir()
    refused(made, str(made / name), "directory")


@pytest.mark.parametrize("name, method", [("config.json", "read_bytes"), (WEIGHTS, "open")])
def test_a_file_that_may_not_be_read(checkpoints, letters, name, method, monkeypatch):
    """The error is simulated, because the user of the tests may be allowed to read every file."""
    made, read = checkpoints.copy(letters), getattr(Path, method)

    def refuse(path, *arguments, **options):
        if path == made / name:
            raise PermissionError(13, "Permission denied", str(path))
        return read(path, *arguments, **options)

    monkeypatch.setattr(Path, method, refuse)
    refused(made, str(made / name), "Permission denied")


def test_a_file_or_an_empty_folder_as_the_model(letters, tmp_path):
    refused(letters / "config.json", "config.json is a file")
    refused(tmp_path, str(tmp_path / "config.json"), "cannot be read")
    refused(tmp_path / "none", "no such folder")


BAD_CONFIGS = [
    *(({"model_type": kind}, [f"model_type={kind!r}", "llama"]) for kind in ("gpt2", None)),
    *(({name: x}, [f"{name}={x!r}"]) for name, x in (("hidden_act", "gelu"), ("mlp_bias", True))),
    *(({name: x}, [name]) for name, x in (("vocab_size", None), ("hidden_size", -32))),
    ({"rope_parameters": {"rope_type": "longrope"}}, ["'longrope'"]),
    ({"rope_parameters": {"rope_type": "linear"}}, ["linear", "factor"]),
    *(
        ({"dtype": None, name: x}, [f"{name}={x!r}", "bfloat16"])
        for name in ("dtype", "torch_dtype")
        for x in ("bf16", "float8", "int8", "", 3, ["float32"])
    ),
]


@pytest.mark.parametrize("edits, words", BAD_CONFIGS, ids=str)
@pytest.mark.usefixtures("no_weights")
def test_a_config_that_is_not_supported(checkpoints, letters, edits, words):
    made = checkpoints.copy(letters, **edits)
    refused(made, str(made), *words)


def test_weights_that_do_not_fit_the_config(checkpoints, letters):
    made = checkpoints.copy(letters, num_hidden_layers=4, vocab_size=100)
    refused(made, "layers.3.input_layernorm", "embed_tokens.weight", "[100, 32]", "[96, 32]")


FAULTS = {  # of a tensor of f32, by what is said of it
    "NaN": lambda t, name: t[name].fill(math.nan),
    "infinity": lambda t, name: t[name].fill(-math.inf),
    "missing": lambda t, name: t.pop(name),
    "expected": lambda t, name: t.update({name: t[name][:-2]}),
    "int32": lambda t, name: t.update({name: t[name].astype(np.int32)}),
    "unexpected": lambda t, name: t.update({f"{name}_more": t[name]}),
}


@pytest.mark.parametrize("method", [None, "eagle", "eagle3"])
@pytest.mark.parametrize("fault", FAULTS)
def test_tensors_that_do_not_fit(checkpoints, letters, heads, method, fault):
    made = checkpoints.copy(heads.get(method, letters))
    name = "fc.weight" if method else NORM
    change_tensors(made, lambda tensors: FAULTS[fault](tensors, name))
    options = {"method": method, "model": made} if method else {}
    refused(letters if method else made, str(made), fault, name, **options)


def test_a_drafter_that_is_none(letters, heads, tmp_path):
    for method in heads:
        refused(letters, "config.json cannot be read", method=method, model=tmp_path)
        refused(letters, str(letters), "drafter", method=method, model=letters)  # a target
        file = heads[method] / "config.json"
        refused(letters, "is a file", method=method, model=file)
    refused(letters, "'mtp' needs a model with an MTP module", "llama", method="mtp")


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
        ("eagle3", {"num_aux": 2}, ["fc.weight", "64", "96", "layer_ids"]),
        ("eagle3", {"fc_norm": False, "norm_before_fc": True}, ["input_norm.weight"]),
        ("eagle3", {"draft_vocab": 40, "lm_head": False}, ["draft_vocab_size=40", "lm_head"]),
    ],
    ids=str,
)
@pytest.mark.usefixtures("no_weights")
def test_a_head_that_does_not_fit_the_target(checkpoints, method, options, words):
    target = checkpoints.target("llama", num_hidden_layers=3)
    head = getattr(checkpoints, method)(target, **options)
    refused(target.folder, *words, method=method, model=head.folder)


def test_a_head_of_the_other_kind(checkpoints):
    target = checkpoints.target("llama", num_hidden_layers=3)
    refused(target.folder, "hidden_norm", method="eagle3", model=checkpoints.eagle(target).folder)
    refused(target.folder, "midlayer", method="eagle", model=checkpoints.eagle3(target).folder)


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda d2t: None, ["draft_vocab_size=20", "96", "no d2t"]),
        (lambda d2t: d2t + VOCAB, ["d2t", "96"]),
        (lambda d2t: d2t - 50, ["d2t", "96"]),
        (lambda d2t: d2t.astype(np.float32), ["d2t", "integers", "float32"]),
        (lambda d2t: d2t[:-1], ["d2t", "20 integers", "[19]"]),
    ],
    ids=["missing", "past-the-end", "negative", "float", "short"],
)
def test_d2t_must_be_whole_and_within_the_vocabulary(checkpoints, letters, target, change, words):
    made = checkpoints.copy(checkpoints.eagle3(target, draft_vocab=20).folder)

    def change_d2t(tensors):
        changed = change(tensors.pop("d2t"))
        tensors |= {} if changed is None else {"d2t": changed}

    change_tensors(made, change_d2t)
    refused(letters, *words, method="eagle3", model=made)


def test_of_a_tensor_in_two_files_the_index_says_which(checkpoints, letters):
    tensors, made = safetensors.load_file(letters / WEIGHTS), checkpoints.copy(letters)
    (made / WEIGHTS).unlink()
    safetensors.save_file(tensors, made / "a.safetensors")
    safetensors.save_file({NORM: 2 * tensors[NORM]}, made / "b.safetensors")
    index = dict.fromkeys(tensors, "a.safetensors") | {NORM: "b.safetensors"}
    write(made, INDEX, json.dumps({"weight_map": index}))
    with simulated_llm(made) as llm:
        np.testing.assert_array_equal(llm.engine.params.target.norm, 2 * tensors[NORM])
    del index[NORM]
    write(made, INDEX, json.dumps({"weight_map": index}))
    refused(made, "missing", NORM)
