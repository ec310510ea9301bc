"""A full disk: the error names the file, and earlier files are kept."""

import errno
import os
import resource
from unittest.mock import Mock

import jax.numpy as jnp
import numpy as np
import pytest
from support.refusals import refusal

from specjax import cli
from specjax.checkpoint.save import save_checkpoint
from specjax.checkpoint.spec import stored
from specjax.checkpoint.writing import check_writable, write_whole

SPECS = [stored(["a"], (512, 512))]
PARAMS = [jnp.ones((512, 512))]
FLOAT32 = np.dtype("float32")


def full(*path):
    return Mock(side_effect=OSError(errno.ENOSPC, "No space left on device", *path))


@pytest.fixture(params=["ENOSPC", "RLIMIT_FSIZE"])
def small_disk(request, monkeypatch):
    """Make writes of more than a page fail: by an error of fsync, or by a limit of the kernel."""
    if request.param == "ENOSPC":
        monkeypatch.setattr(os, "fsync", full())
        yield errno.ENOSPC
    else:
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
        yield errno.EFBIG
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_text_is_written_whole(tmp_path):
    path = tmp_path / "profile.json"
    for text in "old", "new":
        write_whole(path, text)
        assert path.read_text() == text and list(tmp_path.iterdir()) == [path]


def save_text(path):
    write_whole(path, "x" * 10_000)


def save_weights(path):
    save_checkpoint(path.parent, SPECS, PARAMS, {"model_type": "llama"}, dtype=FLOAT32)


@pytest.mark.parametrize("save", [save_text, save_weights])
def test_what_finds_no_room(tmp_path, small_disk, save):
    path = tmp_path / ("profile.json" if save is save_text else "model.safetensors")
    path.write_text("old")
    with pytest.raises(OSError) as error:
        save(path)
    assert error.value.errno == small_disk
    assert error.value.filename == str(path if save is save_text else tmp_path)
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


def test_commands_say_it_in_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(cli, "import_module", lambda _: Mock(run=full(str(tmp_path / "out"))))
    assert cli.main(["train", "target", "--data", "a.txt", "--out", "out"]) == 2
    error = capsys.readouterr().err
    assert f"specjax: error: {tmp_path}/out: No space left on device; free some" in error


def test_a_training_run_names_where_its_state_was_to_go(tmp_path, monkeypatch):
    loop = pytest.importorskip("specjax.train.loop")
    monkeypatch.setattr(loop.ocp, "CheckpointManager", full())
    schedule = loop.Schedule(steps=1, batch_size=1, length=1, learning_rate=0.1, seed=0)
    params, labels = {"w": jnp.ones((2, 2))}, {"w": "muon"}
    with pytest.raises(OSError) as error:
        loop.fit(params, None, labels, None, None, tmp_path / "run", schedule)
    assert error.value.filename == str(tmp_path / "run")


@pytest.mark.parametrize("path", [None, 5, b"profile.json"])
def test_a_path_of_another_type(path):
    refusal(lambda: check_writable("path", path), f"path={path!r}", "name a file")
