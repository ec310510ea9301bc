"""JSON files that are missing or damaged."""

import pytest

from specjax.checkpoint.config_json import read_json
from specjax.checkpoint.errors import CheckpointError


@pytest.mark.parametrize("content", [None, b"", b"{", b"[]", b"\xff"])
def test_a_bad_config_is_named(tmp_path, content):
    if content is not None:
        (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(CheckpointError, match="config.json (cannot be read|is damaged)"):
        read_json(tmp_path, "config.json")
