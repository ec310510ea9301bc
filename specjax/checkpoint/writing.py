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


def check_writable(option: str, path: Path) -> None:
    """Refuse a place for a file before the work that is to fill it.

    Raises:
        ValueError: with the option that named it, and what to name instead.
    """
    parent = path.expanduser().absolute().parent
    if path.expanduser().is_dir() or not parent.is_dir():
        raise ValueError(f"{option} {path} cannot be a file; name one in an existing folder")
    try:
        tempfile.TemporaryFile(dir=parent).close()
    except OSError as error:
        raise ValueError(
            f"{option} {path} cannot be written ({error.strerror}); name a file elsewhere"
        ) from error


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
