"""Folders and hub ids: the real hub client on a local cache, and a fake client for downloads."""

from pathlib import Path

import huggingface_hub.constants
import numpy as np
import pytest
from safetensors.numpy import save_file
from support.refusals import refusal

from specjax.checkpoint.hub import resolve


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty hub cache, without network access."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    return tmp_path / "hub"


def test_a_folder_is_itself(tmp_path, monkeypatch):
    assert resolve(tmp_path) == resolve(str(tmp_path)) == tmp_path
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve("~") == tmp_path
    (tmp_path / "org" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert resolve("org/name") == Path("org/name")


@pytest.mark.parametrize(
    "name", ["./foo", "../foo", "/x/y", "~/foo", "foo", "", "a/b/c", "a\\b", Path("org/name")]
)
def test_a_path_that_does_not_exist(cache, monkeypatch, tmp_path, name):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    refusal(lambda: resolve(name), f"no such folder: {str(name)!r}")


def test_a_cached_snapshot_needs_no_network_but_its_weights(cache):
    words = "org/name is not a folder", "local hub cache", "HF_HOME", "login"
    refusal(lambda: resolve("org/name"), *words)
    repo, commit = cache / "models--org--name", "0" * 40
    snapshot = repo / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(commit)
    refusal(lambda: resolve("org/name"), "not complete in the local hub cache")
    save_file({"a": np.ones(2)}, snapshot / "model.safetensors")
    assert resolve("org/name") == snapshot


@pytest.mark.parametrize("weights", ["model.safetensors", "pytorch_model.bin"])
def test_torch_files_are_downloaded_only_without_safetensors(tmp_path, monkeypatch, weights):
    calls = []

    def fake_download(repo_id, *, allow_patterns, ignore_patterns, local_files_only):
        assert repo_id == "org/name"
        if local_files_only:
            raise FileNotFoundError("not cached")
        calls.append(allow_patterns)
        if any(Path(weights).match(pattern) for pattern in allow_patterns):
            (tmp_path / weights).touch()
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", fake_download)
    assert resolve("org/name") == tmp_path
    assert (tmp_path / weights).exists()
    assert len(calls) == (1 if weights == "model.safetensors" else 2)
    assert not any(pattern.endswith(".bin") for pattern in calls[0])
