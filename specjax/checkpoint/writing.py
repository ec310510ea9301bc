"""Writes files atomically, with errors that name the file."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Raise each OSError of the `with` block again, with `path` as its file name."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error


def check_writable(option: str, path: str | os.PathLike[str]) -> None:
    """Check that an output file can be written, before the work that produces the file.

    Raises:
        ValueError: the file cannot be written; the message names the option and a remedy.
    """
    if not isinstance(path, str | os.PathLike):
        raise ValueError(f"{option}={path!r} must be a text or a Path; name a file")
    whole = Path(path).expanduser().absolute()
    if whole.is_dir() or not whole.parent.is_dir():
        raise ValueError(f"{option} {path} cannot be a file; name one in an existing folder")
    try:
        tempfile.TemporaryFile(dir=whole.parent).close()
    except OSError as error:
        raise ValueError(
            f"{option} {path} cannot be written ({error.strerror}); name a file elsewhere"
        ) from error


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file atomically: on failure, the previous content stays. Texts become UTF-8.

    Raises:
        OSError: the file cannot be written; the error names the path.
    """
    with naming(path), tempfile.TemporaryDirectory(dir=path.parent, prefix=".saving-") as folder:
        temporary = Path(folder, path.name)
        with temporary.open("wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
