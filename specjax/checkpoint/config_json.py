"""Reads a checkpoint's JSON files, such as config.json and shard indexes."""

import json
from pathlib import Path
from typing import Any

from specjax.checkpoint.errors import CheckpointError, damaged


def read_json(folder: Path, name: str) -> dict[str, Any]:
    """Return the JSON object in the file `name` of `folder`.

    Raises:
        CheckpointError: the file is missing, cannot be read, or does not have a JSON object.
    """
    path = Path(folder) / name
    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be read ({error.strerror}); pass a folder in Hugging Face layout with "
            "readable files"
        ) from error
    except (ValueError, RecursionError) as error:
        raise damaged(path, f"it is not JSON ({error})") from error
    if not isinstance(content, dict):
        raise damaged(path, "it is not a JSON object")
    return content
