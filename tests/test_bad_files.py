"""Checkpoints whose files are missing, damaged or of another model are refused by file and fault.

Engines are simulated; every check comes before, or while, weights are read.
"""

import json
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy as safetensors
from support.refusals import label
from support.texts import letters_folder, simulated_llm

from specjax import CheckpointError

NORM = "model.norm.weight"
WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def folder(checkpoints):
    return letters_folder(checkpoints)


@pytest.fixture(scope="module")
def heads(checkpoints):
    """The folders of a drafter for the target, by method."""
    target = checkpoints.target("llama", tie_word_embeddings=True, eos_token_id=95)
    return {"eagle": checkpoints.eagle(target).folder, "eagle3": checkpoints.eagle3(target).folder}


def refused(folder: Path, *words: str, **options) -> None:
    """The error names the folder, or a file in it, and the fault."""
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


BAD_FILES = [
    *(("config.json", text, ["is damaged", "JSON"]) for text in ("", "{", "[]", "5", b"\xff\xfe")),
    *(
        ("tokenizer.json", text, ["is not a tokenizer", "restore"])
        for text in ("", "{}", "[]", b"\xff", '{"model": 5}')
    ),
    *(("tokenizer_config.json", text, ["is damaged", "JSON"]) for text in ("", "[]", b"\xff")),
    *(
        ("tokenizer_config.json", text, ["chat_template=", "a list of", "mend"])
        for text in ('{"chat_template": 5}', '{"chat_template": [{"name": "a"}]}')
    ),
    ("tokenizer_config.json", '{"bos_token": {"id": 1}}', ["bos_token={'id': 1}", "mend"]),
    ("chat_template.jinja", b"\xff\xfe", ["cannot be read", "restore"]),
    *(("generation_config.json", text, ["is damaged", "JSON"]) for text in ("", "[]")),
    *(
        ("generation_config.json", f'{{"eos_token_id": {value}}}', ["eos_token_id", "mend"])
        for value in ('"x"', "1.5", "-1", "true", '[1, "a"]')
    ),
    ("generation_config.json", '{"temperature": "hot"}', ["temperature='hot'", "mend"]),
    (WEIGHTS, b"", ["is damaged", "again"]),
    (WEIGHTS, b"<!DOCTYPE html>" + b" " * 400, ["is damaged", "again"]),
    (WEIGHTS, b"version https://git-lfs.github.com/spec/v1", ["git-lfs pointer", "git lfs pull"]),
]


@pytest.mark.parametrize(
    "name, content, words", [pytest.param(*one, id=label(one[:2])) for one in BAD_FILES]
)
def test_a_damaged_file(checkpoints, folder, name, content, words):
    made = checkpoints.copy(folder)
    write(made, name, content)
    refused(made, str(made / name), *words)


BAD_FOLDERS = "config.json", "tokenizer.json", "chat_template.jinja", WEIGHTS


@pytest.mark.parametrize("name", BAD_FOLDERS)
def test_a_folder_in_a_files_place(checkpoints, folder, name):
    made = checkpoints.copy(folder)
    (made / name).unlink(missing_ok=True)
    (made / name).mkdir()
    refused(made, str(made / name), "directory")


@pytest.mark.parametrize("name, method", [("config.json", "read_bytes"), (WEIGHTS, "open")])
def test_a_file_that_may_not_be_read(checkpoints, folder, name, method, monkeypatch):
    """By the method that reads it: whoever runs the tests may be allowed to read everything."""
    made, read = checkpoints.copy(folder), getattr(Path, method)

    def refuse(path, *arguments, **options):
        if path == made / name:
            raise PermissionError(13, "Permission denied", str(path))
        return read(path, *arguments, **options)

    monkeypatch.setattr(Path, method, refuse)
    refused(made, str(made / name), "Permission denied", "read")


def test_a_truncated_file(checkpoints, folder):
    made = checkpoints.copy(folder)
    write(made, WEIGHTS, (folder / WEIGHTS).read_bytes()[:-5])
    refused(made, str(made / WEIGHTS), "is damaged", "bytes", "again")


def test_a_file_or_an_empty_folder_as_the_model(folder, tmp_path):
    refused(folder / "config.json", "config.json is a file", "pass the folder")
    refused(tmp_path, str(tmp_path / "config.json"), "cannot be read", "Hugging Face layout")
    refused(tmp_path / "none", "no such folder", "hub id", "demo")


BAD_TENSORS = [
    (lambda t: t.update({NORM: np.full(32, math.nan, np.float32)}), ["NaN", NORM, "again"]),
    (lambda t: t.update({NORM: np.full(32, -math.inf, np.float32)}), ["infinity", NORM]),
    (lambda t: t.pop(NORM), ["missing", NORM]),
    (lambda t: t.update(extra=np.zeros(3, np.float32)), ["unexpected", "extra"]),
    (lambda t: t.update({NORM: np.zeros(3, np.float32)}), [NORM, "expected [32], found [3]"]),
    (lambda t: t.update({NORM: np.zeros(32, np.int32)}), [NORM, "int32", "floating point"]),
    (lambda t: t.clear(), ["missing", NORM]),
]


@pytest.mark.parametrize(
    "change, words", BAD_TENSORS, ids="nan inf missing extra shape integers none".split()
)
def test_tensors_that_do_not_fit(checkpoints, folder, change, words):
    made = checkpoints.copy(folder)
    change_tensors(made, change)
    refused(made, str(made), *words)


@pytest.mark.parametrize("method", ["eagle", "eagle3"])
@pytest.mark.parametrize(
    "change, words",
    [
        (lambda t: t["fc.weight"].fill(math.nan), ["NaN", "fc.weight", "again"]),
        (lambda t: t.pop("fc.weight"), ["missing", "fc.weight"]),
        (lambda t: t.update(extra=np.zeros(3, np.float32)), ["unexpected", "extra"]),
        (lambda t: t.update({"fc.weight": np.zeros((3, 4), np.float32)}), ["found [3, 4]"]),
    ],
    ids="nan missing extra shape".split(),
)
def test_a_drafters_tensors_that_do_not_fit(checkpoints, folder, heads, method, change, words):
    made = checkpoints.copy(heads[method])
    change_tensors(made, change)
    refused(folder, str(made), *words, method=method, model=made)


def test_a_drafter_that_is_none(checkpoints, folder, heads, tmp_path):
    for method in heads:
        refused(folder, "config.json cannot be read", method=method, model=tmp_path)
        refused(folder, str(folder), "drafter", method=method, model=folder)  # a target
        file = heads[method] / "config.json"
        refused(folder, "is a file", method=method, model=file)
    refused(folder, "method 'mtp' needs a model", "llama", method="mtp")


@pytest.fixture
def shards(checkpoints, folder):
    """Makes a folder of two files by an index; both hold the last norm, once doubled."""
    tensors = safetensors.load_file(folder / WEIGHTS)
    names = sorted(tensors)
    halves = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    files = {file: {n: tensors[n] for n in half} for file, half in halves.items()}
    other = next(file for file in files if NORM not in files[file])
    files[other][NORM] = 2 * tensors[NORM]
    index = {"weight_map": {n: file for file, half in halves.items() for n in half}}

    def make(index):
        made = checkpoints.copy(folder)
        (made / WEIGHTS).unlink()
        for file, held in files.items():
            safetensors.save_file(held, made / file)
        write(made, f"{WEIGHTS}.index.json", json.dumps(index))
        return made

    return make, index


def test_an_index_that_does_not_hold(shards):
    make, index = shards
    name = f"{WEIGHTS}.index.json"
    refused(make({}), name, "no weight_map")
    refused(make([]), name, "not a JSON object")
    refused(make({"weight_map": {NORM: 5}}), name, NORM, "in 5")
    refused(make({"weight_map": {NORM: "../a.safetensors"}}), name, NORM, "'../a.safetensors'")
    refused(make({"weight_map": {NORM: "c.safetensors"}}), "lacks c.safetensors", "download")
    refused(make({"weight_map": {"other": "a.safetensors"}}), "a.safetensors", "puts other in it")
    missing = {n: file for n, file in index["weight_map"].items() if n != NORM}
    refused(make({"weight_map": missing}), "missing", NORM)


def test_of_a_tensor_in_two_files_the_index_says_which(shards, folder):
    make, index = shards
    expected = safetensors.load_file(folder / WEIGHTS)[NORM]
    with simulated_llm(make(index)) as llm:
        np.testing.assert_array_equal(llm.engine.params.target.norm, expected)
