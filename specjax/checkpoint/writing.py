"""Files that appear whole or not at all, and errors that say which could not be written."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Have an OSError name what was to be written: that of a full disk does not."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error


def write_whole(path: Path, text: str) -> None:
    """Write a file that has all of the text, or leave what was there before.

    Raises:
        OSError: with the path.
    """
    with naming(path), tempfile.TemporaryDirectory(dir=path.parent, prefix=".saving-") as folder:
        temporary = Path(folder, path.name)
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
