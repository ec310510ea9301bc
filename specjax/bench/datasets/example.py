"""What all data sets share: their examples, their options, and the rows of their files.

This module imports nothing slow, so that --help is fast.
"""

import gzip
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, Protocol

_LOG = logging.getLogger("specjax")


@dataclass(frozen=True, kw_only=True)
class Example:
    """The prompt of one request. Exactly one of the first three fields is given.

    Attributes:
        messages: a conversation, which a chat template turns into a prompt.
        text: a whole prompt, which needs no template.
        token_ids: a whole prompt of token ids.
        output_len: the number of tokens to generate at most; None if the data set does not say.
        group: the part of the data set, such as a category; figures are also given per group.
        arrival: seconds after the start at which the request arrives; None if the data set does
            not say.
    """

    messages: Sequence[Mapping[str, Any]] | None = None
    text: str | None = None
    token_ids: Sequence[int] | None = None
    output_len: int | None = None
    group: str = ""
    arrival: float | None = None


@dataclass(frozen=True, kw_only=True)
class RowSource:
    """What a data set needs to make its examples.

    Attributes:
        path: the file that the user gave; None without --dataset-path.
        count: the number of examples to make. A data set that reads a file may return more.
        random: the source of all random choices.
        vocabulary: returns the ids of tokens that may be drawn, for random prompts.
        count_tokens: returns the number of tokens of a text.
        notes: sentences about rows that were left out or repeated, for the log and the result.
    """

    path: Path | None
    count: int
    random: Random
    vocabulary: Callable[[], Sequence[int]]
    count_tokens: Callable[[str], int]
    notes: list[str] = field(default_factory=list)

    def note(self, text: str) -> None:
        """Log a sentence, and keep it for the result."""
        _LOG.info(text)
        self.notes.append(text)


class Dataset(Protocol):
    """A kind of data set: a frozen dataclass whose fields are the options of this kind.

    A field made by `option` becomes the flag `--NAME-FIELD`, where NAME is the data set's name.
    """

    def check(self) -> None:
        """Raise a ValueError if an option of the data set is wrong."""
        ...

    def examples(self, source: RowSource) -> list[Example]:
        """Return the examples.

        Raises:
            ValueError: the data set's file is missing or malformed (the message names the line and
                the field), or the file does not have what an option asks for.
        """
        ...


def option(default: Any, text: str) -> Any:
    """Return a dataclass field that becomes a command-line flag. `text` is the flag's help."""
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True)
class Row:
    """A row of a file of JSON objects."""

    path: Path
    place: str  # "line 3" of a file of lines, "item 3" of an array
    fields: Mapping[str, Any]

    def error(self, text: str) -> ValueError:
        """Return an error about this row."""
        return ValueError(f"{self.path}, {self.place}: {text}")

    def text(self, name: str) -> str:
        """Return a text field. Raise a ValueError if it is missing, blank or not a text."""
        value = self.fields.get(name)
        if not isinstance(value, str) or not value.strip():
            known = ", ".join(self.fields) or "none"
            raise self.error(f"the field {name!r} must be a text; the row's fields: {known}")
        return value

    def count(self, name: str) -> int | None:
        """Return a field that must be an integer of at least 1, or None if it is missing."""
        value = self.fields.get(name)
        if value is not None and (type(value) is not int or value < 1):
            raise self.error(
                f"the field {name!r} is {value!r}; it must be an integer of at least 1"
            )
        return value


def read_rows(source: RowSource, remedy: str) -> Iterator[Row]:
    """Yield the JSON objects in the file that the user gave; see `read_text` and `parse_rows`."""
    text = read_text(source, remedy)
    assert source.path is not None
    return parse_rows(source.path, text)


def read_text(source: RowSource, remedy: str) -> str:
    """Return the text of the file that the user gave.

    A file whose name ends in .gz is decompressed. `remedy` says where to get the file. It is the
    end of the error messages.

    Raises:
        ValueError: no file was given, or the file cannot be read.
    """
    path = source.path
    if path is None:
        raise ValueError(f"--dataset-path is missing; {remedy}")
    opened = gzip.open if path.suffix == ".gz" else open
    try:
        with opened(path, "rt", encoding="utf-8") as file:
            return file.read()
    except (OSError, UnicodeDecodeError, EOFError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ValueError(f"--dataset-path {path} cannot be read ({reason}); {remedy}") from error


def parse_rows(path: Path, text: str) -> Iterator[Row]:
    """Yield the objects in a file's `text`: one per line, or the items of one JSON array.

    Raises:
        ValueError: the text is malformed.
    """
    if text.lstrip().startswith("["):
        for i, item in enumerate(_parse(path, "the array", text), start=1):
            yield _row(path, f"item {i}", item)
        return
    for i, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            yield _row(path, f"line {i}", _parse(path, f"line {i}", line))


def _parse(path: Path, place: str, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}, {place}: not JSON: {error}") from None


def _row(path: Path, place: str, value: Any) -> Row:
    if not isinstance(value, dict):
        raise ValueError(f"{path}, {place}: {type(value).__name__} instead of an object")
    return Row(path, place, value)


def user(text: str) -> list[dict[str, str]]:
    """Return a conversation with `text` as the only message, from the user."""
    return [{"role": "user", "content": text}]
